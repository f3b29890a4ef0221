// What a step costs, as millrace/enginemodel/step_cost.py says it, and sums over runs of decode steps in closed form.
#pragma once

#include <cstdint>
#include <vector>

namespace millrace {

// Femtoseconds. Sums over an hour of steps pass 64 bits; exactness is the point of integers here.
__extension__ typedef __int128 Fs;

constexpr std::int64_t FS_PER_NS = 1'000'000;

// A piecewise-linear cost over one quantity >= 0; the last piece has no end.
struct Curve {
    std::vector<std::int64_t> starts;
    std::vector<std::int64_t> values;
    std::vector<std::int64_t> slopes;

    std::size_t piece(std::int64_t quantity) const;
    Fs at(std::int64_t quantity) const;
};

struct Composition {
    std::int64_t decodes = 0;
    std::int64_t prefills = 0;
    std::int64_t prefill_tokens = 0;
    std::int64_t context_tokens = 0;
    std::int64_t half_work = 0;  // twice the prefill work
    std::int64_t prefill_context_tokens = 0;
    std::int64_t longest_context = 0;
};

struct StepCost {
    std::int64_t fixed = 0;
    std::int64_t decode = 0;
    std::int64_t prefill_token = 0;
    std::int64_t context_token = 0;
    std::int64_t tail_token = 0;
    std::int64_t tail_decodes = 0;
    std::int64_t prefill_half_work = 0;
    std::int64_t mixed_decode = 0;
    std::int64_t mixed_context_token = 0;
    std::int64_t mixed_work = 0;
    std::vector<Curve> tokens;     // none or one
    std::vector<Curve> sequences;  // none or one
    std::vector<Curve> decode_context;
    std::vector<Curve> prefill_work;
    std::vector<Curve> mixed_context;
    std::int64_t prefill_granularity = 64;

    // What so many decodes cost more because the longest, where it is known, is longer than their mean.
    Fs tail(std::int64_t decodes, std::int64_t context, std::int64_t longest) const;
    // What decodes beside prompt tokens cost more than each alone.
    Fs mixed(std::int64_t decodes, std::int64_t context, std::int64_t prefill_tokens) const;
    Fs duration(const Composition& batch) const;
    // The same engine, `scale` times as slow; rounds as Python's round() does.
    StepCost scaled(double scale) const;
};

// Successive steps of the same decoding sequences, each context growing by one token a step. Steps count from 0.
class DecodeRun {
public:
    // `context`: sum of contexts after the first step; `longest`: the longest of them, 0 where it is not known. How
    // much it is longer than their mean is the same in all steps.
    DecodeRun(const StepCost& cost, std::int64_t decodes, std::int64_t context, std::int64_t longest);

    // Cost of one step.
    Fs step(std::int64_t index) const;
    // Cost of the first `steps` steps.
    Fs sum(std::int64_t steps) const;
    // The costliest of the steps [begin, end), which are not empty.
    Fs worst(std::int64_t begin, std::int64_t end) const;
    // Most of the first `steps_max` steps whose sum stays below `limit`.
    std::int64_t below(Fs limit, std::int64_t steps_max) const;

private:
    // Steps whose costs rise (or fall) evenly.
    struct Stretch {
        std::int64_t steps;
        Fs first;
        Fs slope;

        Fs sum(std::int64_t count) const;
    };

    static Stretch above_least(Fs value, Fs slope, std::int64_t steps);
    // Calls visit(Stretch) for the steps [begin, end) in order, until it returns false.
    template <typename Visit>
    void stretches(std::int64_t begin, std::int64_t end, Visit&& visit) const;

    const StepCost& cost_;
    const Curve* curve_ = nullptr;
    std::int64_t decodes_;
    std::int64_t context_;
    Fs base_;
};

}  // namespace millrace
