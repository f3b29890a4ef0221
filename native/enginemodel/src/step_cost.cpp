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
    Fs attention = Fs{context_token} * batch.context_tokens;
    if (!decode_context.empty() && batch.decodes > 0) {
        attention += for_count(decode_context, batch.decodes).at(batch.context_tokens - batch.prefill_context_tokens);
    }
    if (longest_token != 0) attention = std::max(attention, Fs{longest_token} * batch.longest_context);
    if (!prefill_work.empty() && batch.prefill_tokens > 0) {
        const std::int64_t index = (batch.prefill_tokens + prefill_granularity - 1) / prefill_granularity;
        cost += for_count(prefill_work, index).at(batch.half_work);
    }
    return std::max<Fs>(FS_PER_NS, cost + attention);
}

StepCost StepCost::scaled(double scale) const {
    if (scale == 1.0) return *this;
    StepCost result;
    result.fixed = scaled_value(fixed, scale);
    result.decode = scaled_value(decode, scale);
    result.prefill_token = scaled_value(prefill_token, scale);
    result.context_token = scaled_value(context_token, scale);
    result.longest_token = scaled_value(longest_token, scale);
    result.prefill_half_work = scaled_value(prefill_half_work, scale);
    result.tokens = scaled_curves(tokens, scale);
    result.sequences = scaled_curves(sequences, scale);
    result.decode_context = scaled_curves(decode_context, scale);
    result.prefill_work = scaled_curves(prefill_work, scale);
    result.prefill_granularity = prefill_granularity;
    return result;
}

DecodeRun::DecodeRun(const StepCost& cost, std::int64_t decodes, std::int64_t context, std::int64_t longest)
    : cost_(cost), decodes_(decodes), context_(context), longest_(longest) {
    base_ = cost.fixed + Fs{cost.decode} * decodes;
    if (!cost.tokens.empty()) base_ += cost.tokens[0].at(decodes);
    if (!cost.sequences.empty()) base_ += cost.sequences[0].at(decodes);
    if (!cost.decode_context.empty() && decodes > 0) curve_ = &for_count(cost.decode_context, decodes);
}

Fs DecodeRun::Stretch::sum(std::int64_t count) const {
    return first * count + slope * (Fs{count} * (count - 1) / 2);
}

template <typename Visit>
void DecodeRun::stretches(std::int64_t begin, std::int64_t end, Visit&& visit) const {
    std::int64_t step = begin;
    while (step < end) {
        // Within one piece of the curve each way in which the step may be bound is a line.
        const std::int64_t context = context_ + step * decodes_;
        std::int64_t piece_end = end;
        Line lines[3] = {{FS_PER_NS, 0}, {base_ + Fs{cost_.context_token} * context, Fs{cost_.context_token} * decodes_}};
        int count = 2;
        if (curve_ != nullptr) {
            const std::size_t piece = curve_->piece(context);
            lines[1].value += curve_->values[piece] + Fs{curve_->slopes[piece]} * (context - curve_->starts[piece]);
            lines[1].slope += Fs{curve_->slopes[piece]} * decodes_;
            if (piece + 1 < curve_->starts.size()) {
                const std::int64_t ahead = curve_->starts[piece + 1] - context;
                piece_end = std::min(end, step + (ahead + decodes_ - 1) / decodes_);
            }
        }
        if (cost_.longest_token != 0) {
            // A batch whose longest context is not known keeps it at 0.
            const std::int64_t longest = longest_ != 0 ? longest_ + step : 0;
            lines[2] = {base_ + Fs{cost_.longest_token} * longest, longest_ != 0 ? Fs{cost_.longest_token} : Fs{0}};
            count = 3;
        }
        // The step costs the highest of the lines: follow it until another one rises above.
        while (step < piece_end) {
            int top = 0;
            for (int index = 1; index < count; ++index) {
                const bool above = lines[index].value > lines[top].value;
                const bool level = lines[index].value == lines[top].value;
                if (above || (level && lines[index].slope > lines[top].slope)) top = index;
            }
            Fs steps = piece_end - step;
            for (int index = 0; index < count; ++index) {
                const Fs gain = lines[index].slope - lines[top].slope;
                const Fs lead = lines[top].value - lines[index].value;
                // The division is only needed where the other line really gets there.
                if (gain > 0 && gain * (steps - 1) > lead) steps = lead / gain + 1;
            }
            const Stretch stretch{static_cast<std::int64_t>(steps), lines[top].value, lines[top].slope};
            if (!visit(stretch)) return;
            for (int index = 0; index < count; ++index) lines[index].value += lines[index].slope * steps;
            step += stretch.steps;
        }
    }
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
