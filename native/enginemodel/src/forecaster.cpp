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

Future& Forecaster::restart(std::int64_t blocks_total, std::size_t sequences) {
    sequences_ = sequences;
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
        ended_valid_ = false;
    }
    rolled_.roll(scaled_, now);
    rolled_to_ = now;
}

// Rolls the future without a candidate to its end, once for all questions.
void Forecaster::roll_all() {
    if (ended_valid_) return;
    scratch_ = rolled_;
    scratch_.record_ends(sequences_);
    scratch_.finish(scaled_);
    ended_ = scratch_.others_ended();
    ended_at_ = scratch_.ended_at();
    preemptions_ = scratch_.preemptions();
    ended_valid_ = true;
}

void Forecaster::watch(std::size_t sequences) {
    scratch_.watch.sequences.assign(sequences, Watch::Tokens{});
    scratch_.watch.left = sequences;
}

std::vector<Load> Forecaster::curve(std::int64_t now, std::int64_t spacing, std::int64_t points) {
    Fs moment = Fs{std::max<std::int64_t>(0, now)} * FS_PER_NS;
    roll_to(moment);
    scratch_ = rolled_;
    std::vector<Load> loads{scratch_.load()};
    while (static_cast<std::int64_t>(loads.size()) < points) {
        moment += Fs{spacing} * FS_PER_NS;
        scratch_.roll(scaled_, moment);
        loads.push_back(scratch_.load());
    }
    return loads;
}

std::optional<Departure> Forecaster::leave(std::int64_t now, std::size_t position) {
    const Fs now_fs = Fs{std::max<std::int64_t>(0, now)} * FS_PER_NS;
    roll_to(now_fs);
    roll_all();
    const Fs own = position < ended_at_.size() ? ended_at_[position] : Fs{-1};
    if (own < now_fs) return std::nullopt;
    scratch_ = rolled_;
    scratch_.end_step(scaled_);
    const bool went = scratch_.remove(-static_cast<Tag>(position) - 1);
    scratch_.finish(scaled_);
    const Fs without = scratch_.others_ended() - (went ? Fs{0} : own);
    Departure answer{};
    answer.relieved = floor_div(ended_ - own - without, FS_PER_NS);
    answer.preemptions_avoided = preemptions_ - scratch_.preemptions();
    answer.others = rolled_.others() - 1;
    answer.rest = (own - now_fs) / FS_PER_NS;
    return answer;
}

Coming Forecaster::join(std::int64_t now, std::int64_t at, const Asked& asked) {
    const Fs now_fs = Fs{std::max<std::int64_t>(0, now)} * FS_PER_NS;
    roll_to(now_fs);
    roll_all();
    scratch_ = rolled_;
    watch(1);
    scratch_.bring(std::max(now_fs, Fs{at} * FS_PER_NS), asked.sequence(1));
    scratch_.finish(scaled_);
    const Watch& watched = scratch_.watch;
    const Watch::Tokens& tokens = watched.sequences[0];
    Coming answer{};
    answer.others_delay = floor_div(scratch_.others_ended() - ended_, FS_PER_NS);
    answer.preemptions = scratch_.preemptions() - preemptions_;
    answer.others = rolled_.others();
    answer.blocks_peak = watched.blocks_peak;
    answer.start = (watched.started - now_fs) / FS_PER_NS;
    answer.e2e = (tokens.last - now_fs) / FS_PER_NS;
    answer.pace = (tokens.last - watched.started) / tokens.count / FS_PER_NS;
    return answer;
}

Answer Forecaster::ask(std::int64_t now, const Asked& asked, bool with_delay) {
    const Fs now_fs = Fs{std::max<std::int64_t>(0, now)} * FS_PER_NS;
    roll_to(now_fs);
    if (with_delay) roll_all();
    scratch_ = rolled_;
    const std::size_t count = static_cast<std::size_t>(asked.sequences);
    watch(count);
    for (std::size_t index = 0; index < count; ++index) {
        scratch_.arrive(now_fs, asked.sequence(static_cast<Tag>(index + 1)));
    }
    scratch_.finish(scaled_, with_delay);
    const Watch& watched = scratch_.watch;
    Fs first = watched.sequences[0].first, last = 0, worst = 0, pauses = 0;
    std::int64_t count_pauses = 0;
    for (const Watch::Tokens& tokens : watched.sequences) {
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
    answer.blocks_peak = watched.blocks_peak;
    answer.preemptions = watched.preemptions;
    answer.others = rolled_.others();
    answer.others_delay = with_delay ? floor_div(scratch_.others_ended() - ended_, FS_PER_NS) : Fs{0};
    return answer;
}

}  // namespace millrace
