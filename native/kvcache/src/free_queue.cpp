#include "free_queue.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace millrace::kvcache {

namespace {

std::size_t at(std::int32_t block) { return static_cast<std::size_t>(block); }

}  // namespace

FreeQueue::FreeQueue(std::span<const std::int32_t> order, std::int32_t total) : end_(total) {
    if (total < 0) throw std::invalid_argument("a pool has at least 0 blocks");
    next_.assign(at(total) + 1, -1);
    previous_.assign(at(total) + 1, -1);
    hit_.assign(at(total), 0);
    left_.assign(at(total), 0);
    next_[at(end_)] = previous_[at(end_)] = end_;
    append(order);
}

std::int32_t FreeQueue::checked(std::int32_t block) const {
    if (block < 0 || block >= end_) throw std::out_of_range("there is no block " + std::to_string(block));
    return block;
}

void FreeQueue::link(std::int32_t block, std::int32_t before) {
    if (is_free(checked(block))) throw std::runtime_error("block " + std::to_string(block) + " is free already");
    const std::int32_t last = previous_[at(before)];
    next_[at(last)] = block;
    previous_[at(block)] = last;
    next_[at(block)] = before;
    previous_[at(before)] = block;
    ++count_;
}

void FreeQueue::unlink(std::int32_t block) {
    const std::int32_t last = previous_[at(block)], following = next_[at(block)];
    next_[at(last)] = following;
    previous_[at(following)] = last;
    next_[at(block)] = previous_[at(block)] = -1;
    --count_;
}

void FreeQueue::remove(std::int32_t block) {
    if (!is_free(checked(block))) throw std::runtime_error("block " + std::to_string(block) + " is not free");
    unlink(block);
    hit_[at(block)] = 1;
}

void FreeQueue::append(std::span<const std::int32_t> blocks) {
    for (const std::int32_t block : blocks) link(block, end_);
}

void FreeQueue::prepend(std::span<const std::int32_t> blocks) {
    const std::int32_t head = next_[at(end_)];
    for (const std::int32_t block : blocks) link(block, head);
}

std::vector<std::int32_t> FreeQueue::after(std::int32_t block) const {
    std::vector<std::int32_t> found;
    if (block >= 0 && !is_free(checked(block))) return found;
    for (std::int32_t each = next_[at(block < 0 ? end_ : block)]; each != end_; each = next_[at(each)]) {
        found.push_back(each);
    }
    return found;
}

std::vector<std::int32_t> FreeQueue::take(std::int32_t count, std::int32_t after, std::int32_t window,
                                          std::int32_t hit_window) {
    if (count < 0 || window < 0 || hit_window < 0) throw std::invalid_argument("counts are at least 0");
    if (count > count_) {
        throw std::length_error(std::to_string(count) + " blocks wanted, " + std::to_string(count_) + " free");
    }
    chosen_.clear();
    chosen_.reserve(at(count));
    collect(count, window, hit_window);
    extend(after, at(count));
    if (chosen_.size() < at(count)) pick_runs(at(count) - chosen_.size());
    for (const std::int32_t block : chosen_) {
        unlink(block);
        hit_[at(block)] = 0;
    }
    return chosen_;
}

// Candidates in order of reuse, each marked as left.
void FreeQueue::collect(std::int32_t count, std::int32_t window, std::int32_t hit_window) {
    ++turn_;
    candidates_.clear();
    const std::int64_t near = std::int64_t{count} + hit_window;
    const std::int64_t looked_at = std::min<std::int64_t>(count_, std::int64_t{count} + window);
    std::int32_t block = end_;
    for (std::int64_t position = 0; position < looked_at; ++position) {
        block = next_[at(block)];
        if (position >= near && hit_[at(block)]) continue;
        candidates_.push_back(block);
        left_[at(block)] = turn_;
    }
    left_count_ = candidates_.size();
}

// Whether the block was left; it is not any more.
bool FreeQueue::pick(std::int32_t block) {
    if (block < 0 || block >= end_ || left_[at(block)] != turn_) return false;
    left_[at(block)] = 0;
    --left_count_;
    return true;
}

void FreeQueue::extend(std::int32_t after, std::size_t count) {
    if (after >= end_) return;
    for (std::int32_t block = after + 1; chosen_.size() < count && pick(block); ++block) chosen_.push_back(block);
}

// The oldest run that is long enough; where none is, the longest ones until one is. All that is left comes sorted.
void FreeQueue::pick_runs(std::size_t count) {
    if (count == left_count_) {
        const auto begin = static_cast<std::ptrdiff_t>(chosen_.size());
        for (const std::int32_t block : candidates_) {
            if (pick(block)) chosen_.push_back(block);
        }
        std::sort(chosen_.begin() + begin, chosen_.end());
        return;
    }
    runs_.clear();
    for (const std::int32_t candidate : candidates_) {
        const Run run = next_run(candidate);
        if (at(run.length) >= count) return use(run, count);
        if (run.length) runs_.push_back(run);
    }
    while (count) {
        auto run = std::find_if(runs_.begin(), runs_.end(), [&](const Run& it) { return at(it.length) >= count; });
        if (run == runs_.end()) {
            run = std::max_element(runs_.begin(), runs_.end(),
                                   [](const Run& one, const Run& other) { return one.length < other.length; });
        }
        const std::size_t used = std::min(at(run->length), count);
        use(*run, used);
        count -= used;
        runs_.erase(run);
    }
}

// The contiguous run around a candidate, taken from what is left; of length 0 where the candidate is in an earlier one.
FreeQueue::Run FreeQueue::next_run(std::int32_t candidate) {
    if (!pick(candidate)) return {candidate, 0};
    std::int32_t first = candidate, last = candidate;
    while (pick(first - 1)) --first;
    while (pick(last + 1)) ++last;
    return {first, last - first + 1};
}

void FreeQueue::use(Run run, std::size_t count) {
    for (std::size_t each = 0; each < count; ++each) chosen_.push_back(run.first + static_cast<std::int32_t>(each));
}

}  // namespace millrace::kvcache
