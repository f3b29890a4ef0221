#include "step_cost.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace millrace {

namespace {

std::int64_t scaled_value(std::int64_t value, double scale) {
    return static_cast<std::int64_t>(std::nearbyint(static_cast<double>(value) * scale));
}

std::vector<Curve> scaled_curves(const std::vector<Curve>& curves, double scale) {
    std::vector<Curve> result = curves;
    for (Curve& curve : result) {
        for (std::int64_t& value : curve.values) value = scaled_value(value, scale);
        for (std::int64_t& slope : curve.slopes) slope = scaled_value(slope, scale);
    }
    return result;
}

const Curve& for_count(const std::vector<Curve>& curves, std::int64_t count) {
    return curves[std::min<std::size_t>(static_cast<std::size_t>(count), curves.size()) - 1];
}

}  // namespace

std::size_t Curve::piece(std::int64_t quantity) const {
    return static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), quantity) - starts.begin()) - 1;
}

Fs Curve::at(std::int64_t quantity) const {
    const std::size_t index = piece(quantity);
    return values[index] + Fs{slopes[index]} * (quantity - starts[index]);
}

Fs StepCost::duration(const Composition& batch) const {
    const std::int64_t computed = batch.decodes + batch.prefill_tokens;
    Fs cost = fixed + Fs{decode} * batch.decodes + Fs{prefill_token} * batch.prefill_tokens;
    cost += Fs{prefill_half_work} * batch.half_work;
    if (!tokens.empty()) cost += tokens[0].at(computed);
    if (!sequences.empty()) cost += sequences[0].at(batch.decodes + batch.prefills);
    const std::int64_t context = batch.context_tokens - batch.prefill_context_tokens;
    cost += Fs{context_token} * batch.context_tokens;
    if (batch.decodes > 0) {
        if (!decode_context.empty()) cost += for_count(decode_context, batch.decodes).at(context);
        cost += tail(batch.decodes, context, batch.longest_context);
    }
    if (batch.prefill_tokens > 0) {
        if (!prefill_work.empty()) {
            const std::int64_t index = (batch.prefill_tokens + prefill_granularity - 1) / prefill_granularity;
            cost += for_count(prefill_work, index).at(batch.half_work);
        }
        if (batch.decodes > 0) cost += mixed(batch.decodes, context, batch.prefill_tokens);
    }
    return std::max<Fs>(FS_PER_NS, cost);
}

Fs StepCost::tail(std::int64_t decodes, std::int64_t context, std::int64_t longest) const {
    if (tail_token == 0 || decodes < tail_decodes) return 0;
    const Fs excess = Fs{longest} * decodes - context;
    return excess > 0 ? excess * tail_token / decodes : Fs{0};
}

Fs StepCost::mixed(std::int64_t decodes, std::int64_t context, std::int64_t prefill_tokens) const {
    Fs cost = Fs{mixed_decode} * decodes + Fs{mixed_context_token} * context;
    cost += Fs{mixed_work} * decodes * prefill_tokens;
    if (!mixed_context.empty()) cost += for_count(mixed_context, decodes).at(context);
    return cost;
}

StepCost StepCost::scaled(double scale) const {
    if (scale == 1.0) return *this;
    StepCost result;
    result.fixed = scaled_value(fixed, scale);
    result.decode = scaled_value(decode, scale);
    result.prefill_token = scaled_value(prefill_token, scale);
    result.context_token = scaled_value(context_token, scale);
    result.tail_token = scaled_value(tail_token, scale);
    result.tail_decodes = tail_decodes;
    result.prefill_half_work = scaled_value(prefill_half_work, scale);
    result.mixed_decode = scaled_value(mixed_decode, scale);
    result.mixed_context_token = scaled_value(mixed_context_token, scale);
    result.mixed_work = scaled_value(mixed_work, scale);
    result.tokens = scaled_curves(tokens, scale);
    result.sequences = scaled_curves(sequences, scale);
    result.decode_context = scaled_curves(decode_context, scale);
    result.prefill_work = scaled_curves(prefill_work, scale);
    result.mixed_context = scaled_curves(mixed_context, scale);
    result.prefill_granularity = prefill_granularity;
    return result;
}

DecodeRun::DecodeRun(const StepCost& cost, std::int64_t decodes, std::int64_t context, std::int64_t longest)
    : cost_(cost), decodes_(decodes), context_(context) {
    base_ = cost.fixed + Fs{cost.decode} * decodes + cost.tail(decodes, context, longest);
    if (!cost.tokens.empty()) base_ += cost.tokens[0].at(decodes);
    if (!cost.sequences.empty()) base_ += cost.sequences[0].at(decodes);
    if (!cost.decode_context.empty() && decodes > 0) curve_ = &for_count(cost.decode_context, decodes);
}

Fs DecodeRun::Stretch::sum(std::int64_t count) const { return first * count + slope * (Fs{count} * (count - 1) / 2); }

template <typename Visit>
void DecodeRun::stretches(std::int64_t begin, std::int64_t end, Visit&& visit) const {
    std::int64_t step = begin;
    while (step < end) {
        // Within one piece of the curve the cost is a line, but not below a nanosecond.
        const std::int64_t context = context_ + step * decodes_;
        std::int64_t piece_end = end;
        Fs value = base_ + Fs{cost_.context_token} * context;
        Fs slope = Fs{cost_.context_token} * decodes_;
        if (curve_ != nullptr) {
            const std::size_t piece = curve_->piece(context);
            value += curve_->values[piece] + Fs{curve_->slopes[piece]} * (context - curve_->starts[piece]);
            slope += Fs{curve_->slopes[piece]} * decodes_;
            if (piece + 1 < curve_->starts.size()) {
                const std::int64_t ahead = curve_->starts[piece + 1] - context;
                piece_end = std::min(end, step + (ahead + decodes_ - 1) / decodes_);
            }
        }
        while (step < piece_end) {
            const Stretch stretch = above_least(value, slope, piece_end - step);
            if (!visit(stretch)) return;
            value += slope * stretch.steps;
            step += stretch.steps;
        }
    }
}

// The first of at most `steps` steps on a line that cost what the line says, or that cost a nanosecond.
DecodeRun::Stretch DecodeRun::above_least(Fs value, Fs slope, std::int64_t steps) {
    const bool below = value < FS_PER_NS;
    const Fs lead = below ? FS_PER_NS - value : value - FS_PER_NS, closing = below ? slope : -slope;
    // The division is only needed where the line really crosses.
    if (closing > 0 && closing * (steps - 1) >= lead) {
        const Fs until = (lead + closing - 1) / closing;  // steps until it has come to the least, at least 1 of them
        steps = static_cast<std::int64_t>(std::clamp<Fs>(until, 1, steps));
    }
    return below ? Stretch{steps, FS_PER_NS, 0} : Stretch{steps, value, slope};
}

Fs DecodeRun::step(std::int64_t index) const {
    Fs result = 0;
    stretches(index, index + 1, [&](const Stretch& stretch) {
        result = stretch.first;
        return true;
    });
    return result;
}

Fs DecodeRun::sum(std::int64_t steps) const {
    Fs result = 0;
    stretches(0, steps, [&](const Stretch& stretch) {
        result += stretch.sum(stretch.steps);
        return true;
    });
    return result;
}

Fs DecodeRun::worst(std::int64_t begin, std::int64_t end) const {
    Fs result = 0;
    stretches(begin, end, [&](const Stretch& stretch) {
        result = std::max({result, stretch.first, stretch.first + stretch.slope * (stretch.steps - 1)});
        return true;
    });
    return result;
}

std::int64_t DecodeRun::below(Fs limit, std::int64_t steps_max) const {
    std::int64_t steps = 0;
    Fs used = 0;
    stretches(0, steps_max, [&](const Stretch& stretch) {
        const Fs whole = stretch.sum(stretch.steps);
        if (used + whole < limit) {
            used += whole;
            steps += stretch.steps;
            return true;
        }
        std::int64_t fits = 0, beyond = stretch.steps;  // fits: below the limit; beyond: not
        if (used >= limit) return false;
        while (beyond - fits > 1) {
            const std::int64_t middle = fits + (beyond - fits) / 2;
            (used + stretch.sum(middle) < limit ? fits : beyond) = middle;
        }
        steps += fits;
        return false;
    });
    return steps;
}

}  // namespace millrace
