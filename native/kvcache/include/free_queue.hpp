// Free blocks in order of reuse, of which contiguous runs are handed out: the rules of
// services/worker/vllm_engine/segment_queue.py on a doubly linked list in an array. No allocation but of what is
// returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace millrace::kvcache {

class FreeQueue {
public:
    // Ids in order of reuse, each of 0 to total - 1.
    FreeQueue(std::span<const std::int32_t> order, std::int32_t total);

    // Takes `count` blocks out, in the order in which the sequence that ends with `after` (-1: none) should use them.
    // Candidates are the first count + window; of those that were hit only the first count + hit_window.
    std::vector<std::int32_t> take(std::int32_t count, std::int32_t after, std::int32_t window,
                                   std::int32_t hit_window);

    // Takes a block out whose content was found: it counts as hit until `take` hands it out.
    void remove(std::int32_t block);

    void append(std::span<const std::int32_t> blocks);
    void prepend(std::span<const std::int32_t> blocks);

    // In order, behind a free block; -1 for all.
    std::vector<std::int32_t> after(std::int32_t block) const;

    std::int32_t count() const { return count_; }

private:
    struct Run {
        std::int32_t first, length;
    };

    void link(std::int32_t block, std::int32_t before);
    void unlink(std::int32_t block);
    std::int32_t checked(std::int32_t block) const;
    bool is_free(std::int32_t block) const { return next_[static_cast<std::size_t>(block)] >= 0; }

    void collect(std::int32_t count, std::int32_t window, std::int32_t hit_window);
    bool pick(std::int32_t block);
    void extend(std::int32_t after, std::size_t count);
    void pick_runs(std::size_t count);
    Run next_run(std::int32_t candidate);
    void use(Run run, std::size_t count);

    std::int32_t end_;  // the list's both ends, an index behind the last block
    std::int32_t count_ = 0;
    std::vector<std::int32_t> next_, previous_;  // -1 where the block is not free
    std::vector<std::uint8_t> hit_;
    // Of one take:
    std::uint64_t turn_ = 0;
    std::vector<std::uint64_t> left_;  // the turn in which the block is a candidate that nobody took yet
    std::size_t left_count_ = 0;
    std::vector<std::int32_t> candidates_, chosen_;
    std::vector<Run> runs_;
};

}  // namespace millrace::kvcache
