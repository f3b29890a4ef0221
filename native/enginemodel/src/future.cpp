#include "future.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace millrace {

void Running::push(const Queued& sequence) {
    prompt.push_back(sequence.prompt);
    total.push_back(sequence.total);
    missing.push_back(sequence.total - sequence.cached);
    end.push_back(sequence.end);
    tag.push_back(sequence.tag);
    slots.push_back(0);
}

Queued Running::pop() {
    const Queued last{prompt.back(), total.back(), end.back(), tag.back(), 0};
    erase(size() - 1);
    return last;
}

void Running::erase(std::size_t index) {
    const auto position = static_cast<std::ptrdiff_t>(index);
    prompt.erase(prompt.begin() + position);
    total.erase(total.begin() + position);
    missing.erase(missing.begin() + position);
    end.erase(end.begin() + position);
    tag.erase(tag.begin() + position);
    slots.erase(slots.begin() + position);
}

Future::Future(const Limits& limits, std::int64_t blocks_total, std::int64_t watermark_blocks)
    : limits_(limits), blocks_total_(blocks_total), watermark_blocks_(watermark_blocks), free_(blocks_total) {}

// The snapshot

void Future::restore_running(const Queued& sequence, std::int64_t computed, std::int64_t blocks) {
    running_.push(sequence);
    // Where steps are scheduled ahead, the one under way counts as computed already.
    const std::int64_t last = sequence.total - 1;
    running_.missing.back() = static_cast<std::int32_t>(sequence.total - std::min(computed, last));
    running_.slots.back() = limits_.room_of(computed, blocks);
    irregular_ += running_.missing.back() != 1 || last < sequence.prompt;
    free_ -= limits_.blocks_for(running_.slots.back());
    ++others_;
}

void Future::restore_waiting(const Queued& sequence, std::int64_t computed, std::int64_t blocks) {
    ++others_;
    const std::int64_t room = limits_.room_of(sequence.total, blocks);
    if (computed <= 0 || room < sequence.total) {
        waiting_.push_back(sequence);
        return;
    }
    arrived_.push_back({sequence, room});
    const std::int64_t last = sequence.total - 1;
    arrived_.back().sequence.cached = static_cast<std::int32_t>(std::min(computed, last));
    free_ -= limits_.blocks_for(room);
}

void Future::restored() {
    std::reverse(waiting_.begin(), waiting_.end());
    std::reverse(arrived_.begin(), arrived_.end());
}

void Future::arrive(Fs at, const Queued& sequence) {
    const auto first = arrivals_.begin() + static_cast<std::ptrdiff_t>(next_);
    const auto later = [](Fs time, const Arrival& arrival) { return time < arrival.at; };
    arrivals_.insert(std::upper_bound(first, arrivals_.end(), at, later), Arrival{at, sequence});
    others_ += sequence.tag <= 0;
}

void Future::bring(Fs at, const Queued& sequence) { comer_ = {at, sequence}; }

// What goes

void Future::end_step(const StepCost& cost) {
    if (!under_way_ && !stepped_ && has_work()) begin(cost);
    if (under_way_) complete();
}

bool Future::remove(Tag tag) {
    const auto found = std::find(running_.tag.begin(), running_.tag.end(), tag);
    if (found != running_.tag.end()) {
        const auto index = static_cast<std::size_t>(found - running_.tag.begin());
        irregular_ -= (running_.missing[index] != 1) | (running_.total[index] <= running_.prompt[index]);
        free_ += limits_.blocks_for(running_.slots[index]);
        running_.erase(index);
    } else if (!removed_waiting(tag)) {
        return false;
    }
    --others_;
    return true;
}

bool Future::removed_waiting(Tag tag) {
    const auto waits = [tag](const Queued& sequence) { return sequence.tag == tag; };
    const auto waiting = std::find_if(waiting_.begin(), waiting_.end(), waits);
    if (waiting != waiting_.end()) {
        waiting_.erase(waiting);
        return true;
    }
    const auto came = [tag](const Arrived& arrived) { return arrived.sequence.tag == tag; };
    const auto arrived = std::find_if(arrived_.begin(), arrived_.end(), came);
    if (arrived == arrived_.end()) return false;
    free_ += limits_.blocks_for(arrived->slots);
    arrived_.erase(arrived);
    return true;
}

Load Future::load() const {
    Load load;
    for (std::size_t index = 0; index < running_.size(); ++index) {
        load.tokens += running_.total[index] - running_.missing[index];
    }
    for (const Arrived& arrived : arrived_) load.tokens += arrived.sequence.cached;
    load.blocks = blocks_total_ - free_;
    load.running = static_cast<std::int64_t>(running_.size());
    load.waiting = static_cast<std::int64_t>(waiting_.size() + arrived_.size());
    load.others = others_;
    load.preemptions = preemptions_;
    return load;
}

// Time

void Future::roll(const StepCost& cost, Fs until) {
    while (true) {
        if (under_way_) {
            if (ends_ >= until) return;
            complete();
        }
        if (clock_ >= until) return;
        if (!has_work() && (next_ == arrivals_.size() || arrivals_[next_].at >= until)) return;
        join();
        if (!jump(cost, until, true)) begin(cost);
    }
}

void Future::finish(const StepCost& cost, bool all) {
    if (under_way_) complete();
    while (all ? has_work() || next_ < arrivals_.size() || comer_.at >= 0 : watch.left > 0) {
        join();
        if (!jump(cost, 0, false)) {
            begin(cost);
            complete();
        }
    }
}

void Future::join() {
    if (!has_work()) {
        joined_ = clock_ = std::max(clock_, next_coming(comer_.at));
    } else if (!stepped_) {
        return;  // the first step was formed before anything came
    } else {
        joined_ = limits_.async_scheduling ? began_ : clock_;  // when the step that begins now was formed
    }
    while (next_ < arrivals_.size() && arrivals_[next_].at <= joined_) {
        const Queued& sequence = arrivals_[next_++].sequence;
        waiting_.insert(waiting_.begin(), sequence);
        if (sequence.tag > 0) watch.joined = true;
    }
    if (comer_.at >= 0 && comer_.at <= joined_) admit_comer();
}

// When somebody comes; -1 for nobody. `comer`: when the one with its KV does, -1 for not at all.
Fs Future::next_coming(Fs comer) const {
    if (next_ == arrivals_.size()) return comer;
    return comer >= 0 ? std::min(comer, arrivals_[next_].at) : arrivals_[next_].at;
}

// Gives the one that comes with its KV its blocks and its place, if there are such.
void Future::admit_comer() {
    const std::int64_t blocks = limits_.blocks_for(comer_.sequence.total);
    const std::size_t places = running_.size() + arrived_.size();
    if (static_cast<std::int64_t>(places) >= limits_.max_sequences || blocks > free_) return;
    free_ -= blocks;
    arrived_.insert(arrived_.begin(), {comer_.sequence, limits_.room_of(comer_.sequence.total)});
    arrived_.front().sequence.cached = comer_.sequence.total - 1;
    comer_.at = -1;
}

// One step

void Future::begin(const StepCost& cost) {
    Composition batch;
    longest_ = 0;
    const auto empty = [&batch] { return batch.decodes + batch.prefills == 0; };
    if (form(batch) && empty()) form(batch);  // the only one that ran made room: the next step follows at once
    batch.longest_context = longest_;
    if (empty()) throw std::logic_error("an engine with work computes nothing");
    if (watch.active()) watch.blocks_peak = std::max(watch.blocks_peak, blocks_total_ - free_);
    began_ = clock_;
    ends_ = clock_ + cost.duration(batch);
    under_way_ = stepped_ = true;
}

// Returns whether somebody was preempted: then nobody is admitted.
bool Future::form(Composition& batch) {
    bool preempted = false;
    const std::int64_t threshold = chunk_limit();
    const std::int64_t budget = schedule_running(batch, threshold, preempted);
    if (!preempted && budget > 0) admit(batch, budget, threshold);
    return preempted;
}

void Future::complete() {
    clock_ = ends_;
    under_way_ = false;
    std::int32_t irregular = 0, ended = 0;
    const std::size_t size = running_.size();
    if (watch.active()) {
        for (std::size_t index = 0; index < size; ++index) {
            if (running_.tag[index] > 0 && running_.missing[index] == 0) note_token(running_.tag[index], clock_);
        }
    }
    std::int32_t* const missing = running_.missing.data();
    std::int32_t* const total = running_.total.data();
    const std::int32_t* const prompt = running_.prompt.data();
    const std::int32_t* const end = running_.end.data();
    // Without branches: most sequences decode, and nobody can foretell who does not.
    for (std::size_t index = 0; index < size; ++index) {
        const std::int32_t sampled = missing[index] == 0;
        missing[index] += sampled;
        total[index] += sampled;
        irregular += (missing[index] != 1) | (total[index] <= prompt[index]);
        ended += total[index] == end[index];
    }
    irregular_ = irregular;
    if (ended > 0) remove_ended();
}

std::int64_t Future::chunk_limit() const {
    const bool alone = running_.size() + waiting_.size() + arrived_.size() <= 1;
    const std::int64_t threshold = alone ? 0 : limits_.long_prefill_token_threshold;
    const std::int64_t chunk = threshold > 0 ? threshold : std::numeric_limits<std::int64_t>::max();
    return arrived_.empty() ? chunk : chunk_beside_arrived(chunk);
}

// Those that came with their KV are left a token each, as those that decode are; the prompts under way share the rest.
std::int64_t Future::chunk_beside_arrived(std::int64_t threshold) const {
    const std::int64_t prompts = std::count_if(running_.missing.begin(), running_.missing.end(),
                                               [](std::int32_t missing) { return missing > 1; });
    if (prompts == 0) return threshold;
    const std::int64_t others = static_cast<std::int64_t>(running_.size() + arrived_.size()) - prompts;
    return std::min(threshold, std::max<std::int64_t>(1, (limits_.token_budget - others) / prompts));
}

std::int64_t Future::schedule_running(Composition& batch, std::int64_t threshold, bool& preempted) {
    std::int64_t budget = limits_.token_budget;
    for (std::size_t index = 0; index < running_.size() && budget > 0; ++index) {
        const std::int32_t total = running_.total[index];
        if (running_.missing[index] == 1 && total <= running_.slots[index] && total > running_.prompt[index]) {
            running_.missing[index] = 0;  // just decodes on within its last block, as nearly all do
            ++batch.decodes;
            batch.context_tokens += total;
            longest_ = std::max<std::int64_t>(longest_, total);
            --budget;
            continue;
        }
        std::int64_t count = running_.missing[index];
        const std::int64_t computed = running_.total[index] - count;
        if (count > 1) count = std::min({count, threshold, budget, limits_.max_model_len - computed - 1});
        const std::int64_t end = computed + count;
        const std::int64_t wanted = limits_.blocks_lacking(running_.slots[index], end);
        while (wanted > free_) {
            const bool itself = index + 1 == running_.size();
            preempt_last();
            preempted = true;
            if (itself) return budget;
        }
        free_ -= wanted;
        running_.slots[index] = std::max(running_.slots[index], limits_.room_of(end));
        put(index, count, batch);
        budget -= count;
    }
    return budget;
}

void Future::preempt_last() {
    free_ += limits_.blocks_for(running_.slots.back());
    waiting_.push_back(running_.pop());
    watch.preemptions += watch.active();
    ++preemptions_;
}

void Future::put(std::size_t index, std::int64_t count, Composition& batch) {
    const std::int64_t before = running_.total[index] - running_.missing[index];
    const std::int64_t after = before + count;
    running_.missing[index] -= static_cast<std::int32_t>(count);
    batch.context_tokens += after;
    // The one last token past the prompt is a decode; all else is a chunk of a prompt, or computed again.
    if (count == 1 && before >= running_.prompt[index] && running_.missing[index] <= 0) {
        ++batch.decodes;
        longest_ = std::max(longest_, after);
    } else {
        ++batch.prefills;
        batch.prefill_tokens += count;
        batch.half_work += count * (2 * before + count);
        batch.prefill_context_tokens += after;
    }
}

void Future::admit(Composition& batch, std::int64_t budget, std::int64_t threshold) {
    while (budget > 0 && static_cast<std::int64_t>(running_.size()) < limits_.max_sequences) {
        std::int64_t count = 0;
        if (!arrived_.empty()) {
            count = admit_arrived(batch, budget, threshold);
        } else if (!waiting_.empty()) {
            count = admit_waiting(batch, budget, threshold);
        }
        if (count == 0) break;
        budget -= count;
    }
}

// Admits the first one that came with its KV. Returns how many tokens of it, 0 where it waits.
std::int64_t Future::admit_arrived(Composition& batch, std::int64_t budget, std::int64_t threshold) {
    const std::int64_t count = first_chunk(arrived_.back().sequence, budget, threshold);
    if (count == 0 || watermark() > free_) return 0;  // the blocks themselves it has
    running_.push(arrived_.back().sequence);
    running_.slots.back() = arrived_.back().slots;
    if (arrived_.back().sequence.tag > 0) {
        watch.joined = true;
        watch.started = clock_;
    }
    arrived_.pop_back();
    put(running_.size() - 1, count, batch);
    return count;
}

// Admits the first one that waits. Returns how many tokens of it, 0 where it does not fit.
std::int64_t Future::admit_waiting(Composition& batch, std::int64_t budget, std::int64_t threshold) {
    const std::int64_t cached = waiting_.back().cached;
    const std::int64_t count = first_chunk(waiting_.back(), budget, threshold);
    if (count == 0 || !fits(waiting_.back(), cached + count)) return 0;
    running_.push(waiting_.back());
    waiting_.pop_back();
    running_.slots.back() = limits_.room_of(cached + count);
    free_ -= limits_.blocks_for(cached + count);
    put(running_.size() - 1, count, batch);
    return count;
}

// Tokens of one that is not running yet that a step with this budget would compute, 0 for none.
std::int64_t Future::first_chunk(const Queued& head, std::int64_t budget, std::int64_t threshold) const {
    const std::int64_t count = std::min<std::int64_t>(head.total - head.cached, threshold);
    if (count <= budget) return count;
    return limits_.chunked_prefill ? budget : 0;
}

bool Future::fits(const Queued& head, std::int64_t tokens) const {
    if (limits_.reserve_full_prompt)
        tokens = std::max(tokens, std::min<std::int64_t>(head.total, limits_.max_model_len));
    return limits_.blocks_for(tokens) + watermark() <= free_;
}

// Runs of equal steps

// Rolls as many steps as are sure to be decodes of all that run, ending before `until` where bounded. Returns whether
// there was one.
bool Future::jump(const StepCost& cost, Fs until, bool bounded) {
    const std::size_t size = running_.size();
    if (size == 0 || irregular_ != 0 || static_cast<std::int64_t>(size) > limits_.token_budget) return false;
    if (!arrived_.empty()) return false;
    if (!waiting_.empty() && !head_is_held_up()) return false;
    const std::int32_t* const total = running_.total.data();
    const std::int32_t* const end = running_.end.data();
    std::int32_t nearest = std::numeric_limits<std::int32_t>::max();
    std::int64_t context = 0;
    for (std::size_t index = 0; index < size; ++index) {
        nearest = std::min(nearest, end[index] - total[index]);
        context += total[index];
    }
    const std::int64_t longest = cost.tail_token != 0 ? *std::max_element(total, total + size) : 0;
    std::int64_t steps = steps_with_blocks(nearest);
    if (steps == 0) return false;
    const DecodeRun run(cost, static_cast<std::int64_t>(size), context, longest);
    if (bounded) steps = run.below(until - clock_, steps);
    // Whoever came with its KV and lacks blocks or a place lacks them as long as all decode on.
    if (const Fs next = next_coming(comer_.at > joined_ ? comer_.at : Fs{-1}); next >= 0) {
        // Up to the first boundary at which somebody has come; with async scheduling, had come a step before.
        const Fs wait = next - clock_;
        if (!limits_.async_scheduling) {
            steps = std::min(steps, run.below(wait, steps) + 1);
        } else if (steps > 0) {
            steps = std::min(steps, wait <= 0 ? 1 : run.below(wait, steps) + 2);
        }
    }
    if (steps == 0) return false;
    take_blocks(steps);
    pass(run, steps);
    if (steps == nearest) remove_ended();
    return true;
}

// Whether nobody can be admitted however long the running ones decode on: they only take blocks.
bool Future::head_is_held_up() const {
    const std::int64_t size = static_cast<std::int64_t>(running_.size());
    const std::int64_t budget = limits_.token_budget - size;
    if (budget <= 0 || size >= limits_.max_sequences) return true;
    const std::int64_t count = first_chunk(waiting_.back(), budget, chunk_limit());
    return count == 0 || !fits(waiting_.back(), waiting_.back().cached + count);
}

// Most of so many steps for which there are blocks.
std::int64_t Future::steps_with_blocks(std::int64_t steps) const {
    const std::int64_t size = static_cast<std::int64_t>(running_.size());
    const std::int64_t groups = std::max<std::int64_t>(1, static_cast<std::int64_t>(limits_.groups.size()));
    if (size * groups * (steps / limits_.block_size + 1) <= free_) {
        // Cheap and nearly always enough; sequences short of blocks already would break the bound.
        bool covered = true;
        for (std::size_t index = 0; index < running_.size(); ++index) {
            covered &= running_.total[index] - 1 <= running_.slots[index];
        }
        if (covered) return steps;
    }
    if (blocks_taken(steps) <= free_) return steps;
    std::int64_t enough = 0, short_of = steps;
    while (short_of - enough > 1) {
        const std::int64_t middle = enough + (short_of - enough) / 2;
        (blocks_taken(middle) <= free_ ? enough : short_of) = middle;
    }
    return enough;
}

std::int64_t Future::blocks_taken(std::int64_t steps) const {
    std::int64_t blocks = 0;
    for (std::size_t index = 0; index < running_.size(); ++index) {
        blocks += limits_.blocks_lacking(running_.slots[index], running_.total[index] - 1 + steps);
    }
    return blocks;
}

void Future::take_blocks(std::int64_t steps) {
    for (std::size_t index = 0; index < running_.size(); ++index) {
        const std::int64_t tokens = running_.total[index] - 1 + steps;
        free_ -= limits_.blocks_lacking(running_.slots[index], tokens);
        running_.slots[index] = std::max(running_.slots[index], limits_.room_of(tokens));
    }
    if (watch.active()) watch.blocks_peak = std::max(watch.blocks_peak, blocks_total_ - free_);
}

// Lets `steps` steps of the run pass. Those that end with the last of them are still there.
void Future::pass(const DecodeRun& run, std::int64_t steps) {
    const Fs end = clock_ + run.sum(steps);
    if (watch.active()) note_run(run, steps, end);
    for (std::int32_t& total : running_.total) total += static_cast<std::int32_t>(steps);
    if (limits_.async_scheduling) began_ = clock_ + run.sum(steps - 1);
    clock_ = joined_ = end;  // nothing that came before can be put in any more
    stepped_ = true;
}

void Future::note_run(const DecodeRun& run, std::int64_t steps, Fs end) {
    for (const Tag tag : running_.tag) {
        if (tag <= 0) continue;
        Watch::Tokens& tokens = watch.sequences[static_cast<std::size_t>(tag) - 1];
        note_token(tag, clock_ + run.step(0));
        if (steps > 1) tokens.worst = std::max(tokens.worst, run.worst(1, steps));
        tokens.count += steps - 1;
        tokens.last = end;
    }
}

// What is measured

void Future::note_token(Tag tag, Fs at) {
    Watch::Tokens& tokens = watch.sequences[static_cast<std::size_t>(tag) - 1];
    if (tokens.count++ == 0) {
        tokens.first = at;
    } else {
        tokens.worst = std::max(tokens.worst, at - tokens.last);
    }
    tokens.last = at;
}

// Takes out, at the end of a step, those at their end, and frees their blocks.
void Future::remove_ended() {
    for (std::size_t index = 0; index < running_.size();) {
        if (running_.total[index] != running_.end[index]) {
            ++index;
            continue;
        }
        free_ += limits_.blocks_for(running_.slots[index]);
        const Tag tag = running_.tag[index];
        if (tag > 0) {
            --watch.left;
        } else {
            --others_;
            others_ended_ += clock_;
            if (tag < 0 && !ended_at_.empty()) ended_at_[static_cast<std::size_t>(-tag) - 1] = clock_;
        }
        running_.erase(index);
    }
}

}  // namespace millrace
