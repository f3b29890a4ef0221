// Answers questions about one instance, with what they have in common done once.
#pragma once

#include <cstdint>

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

class Forecaster {
public:
    Forecaster(const Limits& limits, const StepCost& cost) : limits_(limits), cost_(cost), scaled_(cost) {}

    // Begins a new snapshot. Then follow its sequences, `restored`, and placements.
    Future& restart(std::int64_t blocks_total);
    void restored();
    // A placement, `at` ns after the snapshot.
    void place(std::int64_t at, const Asked& placed);
    void set_scale(double scale);

    // Answers for a candidate that comes `now` ns after the snapshot.
    // `with_delay`: also what it does to the others, which is about half of the work; else others_delay is 0.
    Answer ask(std::int64_t now, const Asked& asked, bool with_delay);

    const Limits& limits() const { return limits_; }

private:
    void roll_to(Fs now);
    Fs others_ended();

    Limits limits_;
    StepCost cost_;
    StepCost scaled_;
    Future base_;     // as of the snapshot, with the placements to come
    Future rolled_;   // the same, rolled to the time of the last question
    Future scratch_;  // keeps its memory between questions
    Fs rolled_to_ = 0;
    bool rolled_valid_ = false;
    Fs ended_ = 0;  // sum of the ends of all that are there, without a candidate
    bool ended_valid_ = false;
};

}  // namespace millrace
