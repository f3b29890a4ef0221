#include "forecaster.hpp"

#include <algorithm>

namespace millrace {

namespace {

// Rounds down, as Python's // does.
Fs floor_div(Fs value, Fs divisor) {
    const Fs quotient = value / divisor;
    return quotient - (value % divisor != 0 && (value < 0) != (divisor < 0));
}

}  // namespace

Queued Asked::sequence(Tag tag) const {
    const auto narrow = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
    return {narrow(prompt), narrow(total), narrow(end), tag, narrow(cached)};
}

Future& Forecaster::restart(std::int64_t blocks_total) {
    const std::int64_t blocks = std::max(blocks_total, limits_.blocks_for(limits_.max_model_len));
    const double watermark = limits_.watermark * static_cast<double>(blocks + 1);
    base_ = Future(limits_, blocks, static_cast<std::int64_t>(watermark));
    rolled_valid_ = ended_valid_ = false;
    return base_;
}

void Forecaster::restored() { base_.restored(); }

void Forecaster::place(std::int64_t at, const Asked& placed) {
    const Fs time = Fs{std::max<std::int64_t>(0, at)} * FS_PER_NS;
    rolled_valid_ = rolled_valid_ && rolled_.can_arrive(time);
    ended_valid_ = false;
    for (std::int64_t index = 0; index < placed.sequences; ++index) {
        const Queued sequence = placed.sequence(0);
        base_.arrive(time, sequence);
        if (rolled_valid_) rolled_.arrive(time, sequence);
    }
}

void Forecaster::set_scale(double scale) {
    scaled_ = cost_.scaled(scale);
    rolled_valid_ = ended_valid_ = false;
}

void Forecaster::roll_to(Fs now) {
    if (!rolled_valid_ || now < rolled_to_) {
        rolled_ = base_;
        rolled_valid_ = true;
    }
    rolled_.roll(scaled_, now);
    rolled_to_ = now;
}

Fs Forecaster::others_ended() {
    if (!ended_valid_) {
        scratch_ = rolled_;
        scratch_.finish(scaled_);
        ended_ = scratch_.others_ended();
        ended_valid_ = true;
    }
    return ended_;
}

Answer Forecaster::ask(std::int64_t now, const Asked& asked, bool with_delay) {
    const Fs now_fs = Fs{std::max<std::int64_t>(0, now)} * FS_PER_NS;
    roll_to(now_fs);
    const Fs without = with_delay ? others_ended() : Fs{0};
    scratch_ = rolled_;
    const std::size_t count = static_cast<std::size_t>(asked.sequences);
    scratch_.watch.sequences.assign(count, Watch::Tokens{});
    scratch_.watch.left = count;
    for (std::size_t index = 0; index < count; ++index) {
        scratch_.arrive(now_fs, asked.sequence(static_cast<Tag>(index + 1)));
    }
    scratch_.finish(scaled_, with_delay);
    const Watch& watch = scratch_.watch;
    Fs first = watch.sequences[0].first, last = 0, worst = 0, pauses = 0;
    std::int64_t count_pauses = 0;
    for (const Watch::Tokens& tokens : watch.sequences) {
        first = std::min(first, tokens.first);
        last = std::max(last, tokens.last);
        worst = std::max(worst, tokens.worst);
        pauses += tokens.last - tokens.first;
        count_pauses += tokens.count - 1;
    }
    Answer answer{};
    answer.ttft = (first - now_fs) / FS_PER_NS;
    answer.e2e = (last - now_fs) / FS_PER_NS;
    answer.tpot_mean = count_pauses > 0 ? pauses / count_pauses / FS_PER_NS : Fs{0};
    answer.tpot_worst = worst / FS_PER_NS;
    answer.blocks_peak = watch.blocks_peak;
    answer.preemptions = watch.preemptions;
    answer.others = rolled_.others();
    answer.others_delay = with_delay ? floor_div(scratch_.others_ended() - without, FS_PER_NS) : Fs{0};
    return answer;
}

}  // namespace millrace
