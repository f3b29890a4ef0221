// Answers questions about one instance, with what they have in common done once.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "future.hpp"

namespace millrace {

// A candidate's sequences, all alike. Lengths are at most that of the model.
struct Asked {
    std::int64_t prompt;
    std::int64_t total;
    std::int64_t end;
    std::int64_t sequences;
    std::int64_t cached;  // less than `total`

    Queued sequence(Tag tag) const;
};

// Times in ns from the question on.
struct Answer {
    Fs ttft;
    Fs e2e;
    Fs tpot_mean;
    Fs tpot_worst;
    std::int64_t blocks_peak;
    std::int64_t preemptions;
    std::int64_t others;
    Fs others_delay;
};

// What the others gain when one goes. Times in ns from the question on.
struct Departure {
    Fs relieved;
    std::int64_t preemptions_avoided;
    std::int64_t others;
    Fs rest;
};

// What the others lose when one comes with its KV.
struct Coming {
    Fs others_delay;
    std::int64_t preemptions;
    std::int64_t others;
    std::int64_t blocks_peak;
    Fs start;
    Fs e2e;
    Fs pace;
};

class Forecaster {
public:
    Forecaster(const Limits& limits, const StepCost& cost) : limits_(limits), cost_(cost), scaled_(cost) {}

    // Begins a new snapshot of so many sequences. Then follow these, `restored`, and placements.
    Future& restart(std::int64_t blocks_total, std::size_t sequences);
    void restored();
    // A placement, `at` ns after the snapshot.
    void place(std::int64_t at, const Asked& placed);
    void set_scale(double scale);

    // Answers for a candidate that comes `now` ns after the snapshot.
    // `with_delay`: also what it does to the others, which is about half of the work; else others_delay is 0.
    Answer ask(std::int64_t now, const Asked& asked, bool with_delay);

    // The load at `now`, which is the first, and at further moments, each `spacing` ns after the one before.
    std::vector<Load> curve(std::int64_t now, std::int64_t spacing, std::int64_t points);
    // What happens if the sequence of this position in the snapshot goes; none where it has ended before `now`.
    std::optional<Departure> leave(std::int64_t now, std::size_t position);
    // What happens if one comes with its KV at `at`, ns after the snapshot as `now` is, and not before it.
    Coming join(std::int64_t now, std::int64_t at, const Asked& asked);

    const Limits& limits() const { return limits_; }

private:
    void roll_to(Fs now);
    void roll_all();
    void watch(std::size_t sequences);

    Limits limits_;
    StepCost cost_;
    StepCost scaled_;
    Future base_;     // as of the snapshot, with the placements to come
    Future rolled_;   // the same, rolled to the time of the last question
    Future scratch_;  // keeps its memory between questions
    Fs rolled_to_ = 0;
    bool rolled_valid_ = false;
    std::size_t sequences_ = 0;  // of the snapshot
    // Of the future without a candidate: the sum of all ends, the end of each sequence, preemptions.
    Fs ended_ = 0;
    std::vector<Fs> ended_at_;
    std::int64_t preemptions_ = 0;
    bool ended_valid_ = false;
};

}  // namespace millrace
