// One instance's future on counts of tokens and blocks: the rules of millrace/enginemodel/scheduler.py, whole runs of
// equal decode steps at once. Times are femtoseconds since the snapshot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "step_cost.hpp"

namespace millrace {

// Layers that take a block for so many tokens, and no more than `most` for a sequence.
struct BlockGroup {
    std::int64_t block_tokens;
    std::int64_t most;
};

// millrace.enginemodel.parameters.EngineParameters, as far as counts go.
struct Limits {
    std::int64_t max_model_len;
    std::int64_t block_size;
    std::int64_t max_sequences;
    std::int64_t token_budget;
    std::int64_t long_prefill_token_threshold;
    bool chunked_prefill;
    bool reserve_full_prompt;
    double watermark;
    bool async_scheduling;

    int block_shift = -1;  // where the block size is a power of two: which; a division costs twenty times a shift
    std::vector<BlockGroup> groups;  // empty for one that keeps all; else `block_size` divides the blocks of each

    // Blocks that hold so many tokens; none for less than one.
    std::int64_t blocks_for(std::int64_t tokens) const {
        if (tokens <= 0) return 0;
        if (groups.empty()) return sizes_in(tokens);
        std::int64_t blocks = 0;
        for (const BlockGroup& group : groups) {
            blocks += std::min(group.most, (tokens + group.block_tokens - 1) / group.block_tokens);
        }
        return blocks;
    }
    // Blocks that one with room for `slots` tokens lacks to hold `tokens`.
    std::int64_t blocks_lacking(std::int64_t slots, std::int64_t tokens) const {
        if (groups.empty()) return blocks_for(tokens - slots);
        return tokens > slots ? blocks_for(tokens) - blocks_for(slots) : 0;
    }
    // Tokens that the blocks of so many have room for.
    std::int64_t room_of(std::int64_t tokens) const { return sizes_in(tokens) * block_size; }
    // The same where the engine tells how many blocks those are; by groups they may be one more or less at times.
    std::int64_t room_of(std::int64_t tokens, std::int64_t blocks) const {
        return groups.empty() ? blocks * block_size : blocks > 0 ? room_of(tokens) : 0;
    }

private:
    std::int64_t sizes_in(std::int64_t tokens) const {
        return block_shift >= 0 ? (tokens + block_size - 1) >> block_shift : (tokens + block_size - 1) / block_size;
    }
};

// Whose sequence it is: above 0 one more than its index in the candidate; 0 for a placement; below 0 for one of the
// snapshot, -1 for the first.
using Tag = std::int32_t;

// A sequence that waits or is still to come.
struct Queued {
    std::int32_t prompt;  // tokens
    std::int32_t total;   // prompt and output so far
    std::int32_t end;     // prompt and output when it has ended
    Tag tag;
    std::int32_t cached = 0;  // of `total`, found in the prefix cache when it is admitted
};

// One that came with its KV and was in no step yet.
struct Arrived {
    Queued sequence;     // `cached`: computed tokens
    std::int64_t slots;  // as a running one's
};

struct Arrival {
    Fs at;
    Queued sequence;
};

// The running sequences in order of admission, one column per field: most loops touch two of them.
class Running {
public:
    std::vector<std::int32_t> prompt;
    std::vector<std::int32_t> total;
    std::vector<std::int32_t> missing;  // tokens of `total` still to compute; 1 while decoding
    std::vector<std::int32_t> end;
    std::vector<Tag> tag;
    std::vector<std::int64_t> slots;  // tokens that the blocks it holds have room for

    std::size_t size() const { return total.size(); }
    void push(const Queued& sequence);
    Queued pop();
    void erase(std::size_t index);
};

// What the candidate's sequences go through.
struct Watch {
    struct Tokens {
        std::int64_t count = 0;
        Fs first = 0;
        Fs last = 0;
        Fs worst = 0;
    };

    std::vector<Tokens> sequences;
    std::size_t left = 0;  // that have not ended
    bool joined = false;
    Fs started = -1;  // begin of its first step, of one that came with its KV
    std::int64_t blocks_peak = 0;
    std::int64_t preemptions = 0;

    bool active() const { return joined && left > 0; }
};

// The instance during the step under way.
struct Load {
    std::int64_t tokens = 0;
    std::int64_t blocks = 0;
    std::int64_t running = 0;
    std::int64_t waiting = 0;
    std::int64_t others = 0;
    std::int64_t preemptions = 0;
};

class Future {
public:
    // The cost is another for each question (calibration), and therefore passed in where time goes on.
    Future() = default;
    Future(const Limits& limits, std::int64_t blocks_total, std::int64_t watermark_blocks);

    // Building the state of the snapshot.
    void restore_running(const Queued& sequence, std::int64_t computed, std::int64_t blocks);
    // One that has computed tokens, and blocks for all of them, came with its KV.
    void restore_waiting(const Queued& sequence, std::int64_t computed, std::int64_t blocks);
    void restored();

    // Sorts a sequence in that comes at `at`, behind those that come at the same time.
    void arrive(Fs at, const Queued& sequence);
    // Whether something that comes at `at` can still be put in without going back.
    bool can_arrive(Fs at) const { return at > joined_; }

    // Rolls on, but begins no step at or after `until` and ends none there.
    void roll(const StepCost& cost, Fs until);
    // Rolls until nothing is left; or, without `all`, until the watched sequences have ended.
    void finish(const StepCost& cost, bool all = true);

    // One that comes with the KV of all but its last token, at `at` or as soon as there are blocks and a place for it.
    void bring(Fs at, const Queued& sequence);
    // Ends the step under way, which at the snapshot is the first one.
    void end_step(const StepCost& cost);
    // Takes one of the snapshot out, between two steps. Returns whether it was there.
    bool remove(Tag tag);

    // Sequences but the candidate's that have not ended, and the sum of the ends of those that have.
    std::int64_t others() const { return others_; }
    Fs others_ended() const { return others_ended_; }
    std::int64_t preemptions() const { return preemptions_; }
    Load load() const;
    // From now on, keeps the end of each of `sequences` of the snapshot; -1 for those that have not ended since.
    void record_ends(std::size_t sequences) { ended_at_.assign(sequences, Fs{-1}); }
    const std::vector<Fs>& ended_at() const { return ended_at_; }

    Watch watch;

private:
    bool has_work() const { return running_.size() > 0 || !waiting_.empty() || !arrived_.empty(); }
    void join();
    void admit_comer();
    Fs next_coming(Fs comer) const;
    bool removed_waiting(Tag tag);
    void begin(const StepCost& cost);
    void complete();
    bool form(Composition& batch);
    std::int64_t schedule_running(Composition& batch, std::int64_t threshold, bool& preempted);
    void admit(Composition& batch, std::int64_t budget, std::int64_t threshold);
    std::int64_t admit_arrived(Composition& batch, std::int64_t budget, std::int64_t threshold);
    std::int64_t admit_waiting(Composition& batch, std::int64_t budget, std::int64_t threshold);
    std::int64_t first_chunk(const Queued& head, std::int64_t budget, std::int64_t threshold) const;
    void put(std::size_t index, std::int64_t count, Composition& batch);
    void preempt_last();
    std::int64_t chunk_limit() const;
    std::int64_t chunk_beside_arrived(std::int64_t threshold) const;
    std::int64_t watermark() const { return running_.size() > 0 ? watermark_blocks_ : 0; }
    bool fits(const Queued& head, std::int64_t tokens) const;
    bool jump(const StepCost& cost, Fs until, bool bounded);
    bool head_is_held_up() const;
    std::int64_t steps_with_blocks(std::int64_t steps) const;
    std::int64_t blocks_taken(std::int64_t steps) const;
    void take_blocks(std::int64_t steps);
    void pass(const DecodeRun& run, std::int64_t steps);
    void note_run(const DecodeRun& run, std::int64_t steps, Fs end);
    void note_token(Tag tag, Fs at);
    void remove_ended();

    Limits limits_{};
    std::int64_t blocks_total_ = 0;
    std::int64_t watermark_blocks_ = 0;
    std::int64_t free_ = 0;

    Fs clock_ = 0;    // end of the last step
    Fs ends_ = 0;     // of the step under way
    Fs began_ = 0;    // begin of the last step
    Fs joined_ = -1;  // until when the queue took in what came
    bool under_way_ = false;
    bool stepped_ = false;

    Running running_;
    std::vector<Queued> waiting_;   // head at the back
    std::vector<Arrived> arrived_;  // head at the back
    std::vector<Arrival> arrivals_;
    std::size_t next_ = 0;   // of arrivals_
    Arrival comer_{-1, {}};  // one that comes with its KV; none, or here already, where its time is -1

    std::int64_t irregular_ = 0;  // running ones that do anything but decode one token
    std::int64_t longest_ = 0;    // scratch of the step being formed
    std::int64_t others_ = 0;
    Fs others_ended_ = 0;
    std::int64_t preemptions_ = 0;
    std::vector<Fs> ended_at_;  // empty where nobody asks
};

}  // namespace millrace
