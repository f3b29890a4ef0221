// Python's side of the forecast: millrace_native.enginemodel. What would break memory or never end is refused here.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "forecaster.hpp"
#include "replica.hpp"
#include "struct_reader.hpp"

namespace nb = nanobind;

namespace millrace {

namespace {

// What a sequence that outran its prediction is given further at least (forecast/present.py).
constexpr std::int64_t OUTRUN_TOKENS = 10;
// Past these a count is no count: products and sums of them stay within 64 bits.
constexpr std::int64_t COUNT_MAX = std::int64_t{1} << 40;
constexpr std::int64_t MODEL_LEN_MAX = std::int64_t{1} << 30;
constexpr std::int64_t BLOCK_SIZE_MAX = std::int64_t{1} << 20;

using CurveTuple = std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::vector<std::int64_t>>;

Curve to_curve(const CurveTuple& tuple) {
    Curve curve{std::get<0>(tuple), std::get<1>(tuple), std::get<2>(tuple)};
    const bool same = curve.starts.size() == curve.values.size() && curve.values.size() == curve.slopes.size();
    if (!same || curve.starts.empty() || curve.starts[0] != 0) throw std::invalid_argument("a cost curve is malformed");
    return curve;
}

std::vector<Curve> to_curves(const std::vector<CurveTuple>& tuples) {
    std::vector<Curve> curves;
    curves.reserve(tuples.size());
    for (const CurveTuple& tuple : tuples) curves.push_back(to_curve(tuple));
    return curves;
}

nb::object to_python(Fs value) {
    const std::int64_t low = static_cast<std::int64_t>(value);
    if (Fs{low} == value) return nb::int_(low);
    const nb::object high = nb::int_(static_cast<std::int64_t>(value >> 64));
    const nb::object rest = nb::int_(static_cast<std::uint64_t>(value));
    return (high << nb::int_(64)) | rest;
}

std::int64_t counted(std::int64_t value, std::int64_t least, const char* what, std::int64_t most = COUNT_MAX) {
    if (value < least || value > most) throw std::invalid_argument(std::string(what) + " is out of range");
    return value;
}

// Fields of SequenceStatus, in the order in which they are read.
enum Field : std::size_t { PROMPT, COMPUTED, OUTPUT, MAX, BLOCKS, EXPECTED };

class SnapshotReader {
public:
    SnapshotReader(const Limits& limits, std::int64_t default_output_tokens)
        : limits_(limits),
          default_output_tokens_(default_output_tokens),
          fields_({"prompt_tokens", "computed_tokens", "output_tokens", "max_tokens", "blocks",
                   "expected_output_tokens"}) {}

    // Puts the sequences into `future`; those at their end are left out.
    // `cached`: of each waiting one, tokens that are in the prefix cache.
    // `leave_at`: tokens at which a sequence leaves; 0 for never.
    void restore(Future& future, nb::list running, nb::list waiting,
                 const std::optional<std::vector<std::int64_t>>& cached, std::int64_t leave_at) {
        leave_at_ = counted(leave_at, 0, "leave_at_tokens");
        std::size_t position = 0;
        for (nb::handle status : running) {
            const Queued sequence = read(status.ptr(), position++);
            if (sequence.end <= sequence.total) continue;
            const std::int64_t computed = counted(fields_.read(status.ptr(), COMPUTED), 0, "computed_tokens");
            future.restore_running(sequence, computed, blocks_of(status));
        }
        if (cached && cached->size() != waiting.size()) throw std::invalid_argument("cached is of another length");
        std::size_t index = 0;
        for (nb::handle status : waiting) {
            Queued sequence = read(status.ptr(), position++);
            const std::int64_t hit = cached ? (*cached)[index++] : 0;
            if (sequence.end <= sequence.total) continue;
            sequence.cached = static_cast<std::int32_t>(counted(hit, 0, "cached", sequence.total - 1));
            const std::int64_t computed = counted(fields_.read(status.ptr(), COMPUTED), 0, "computed_tokens");
            future.restore_waiting(sequence, computed, blocks_of(status));
        }
    }

    std::int64_t blocks_of(nb::handle status) { return counted(fields_.read(status.ptr(), BLOCKS), 0, "blocks"); }
    // As many as the future takes it to hold.
    std::int64_t blocks_counted(nb::handle status) {
        const std::int64_t blocks = blocks_of(status);
        if (limits_.groups.empty()) return blocks;
        return limits_.blocks_for(limits_.room_of(fields_.read(status.ptr(), COMPUTED), blocks));
    }

private:
    // One that has ended, or is longer than any can be, has its end where it is.
    Queued read(PyObject* status, std::size_t position) {
        const std::int64_t prompt = counted(fields_.read(status, PROMPT), 1, "prompt_tokens");
        const std::int64_t output = counted(fields_.read(status, OUTPUT), 0, "output_tokens");
        const std::int64_t expected = std::max<std::int64_t>(1, fields_.read(status, EXPECTED, default_output_tokens_));
        const std::int64_t half = expected / 2;
        std::int64_t final_tokens =
            output < expected ? std::max(expected, output + half) : output + std::max(OUTRUN_TOKENS, half);
        final_tokens = std::min(final_tokens, fields_.read(status, MAX));
        final_tokens = std::min(final_tokens, limits_.max_model_len - prompt);
        if (prompt + output < leave_at_) final_tokens = std::min(final_tokens, leave_at_ - prompt);
        if (final_tokens <= output) return Queued{0, 0, 0, 0, 0};
        const Tag tag = -static_cast<Tag>(position) - 1;
        return Asked{prompt, prompt + output, prompt + final_tokens, 1, 0}.sequence(tag);
    }

    const Limits& limits_;
    std::int64_t default_output_tokens_;
    std::int64_t leave_at_ = 0;
    StructReader fields_;
};

class PyForecaster {
public:
    PyForecaster(const Limits& limits, const StepCost& cost, std::int64_t default_output_tokens)
        : forecaster_(limits, cost), reader_(forecaster_.limits(), default_output_tokens) {}
    PyForecaster(const PyForecaster&) = delete;
    PyForecaster& operator=(const PyForecaster&) = delete;

    void load(nb::list running, nb::list waiting, std::int64_t blocks_free,
              const std::optional<std::vector<std::int64_t>>& cached, std::int64_t leave_at) {
        loaded_ = false;
        std::int64_t blocks = counted(blocks_free, 0, "blocks_free");
        for (nb::handle status : running) blocks += reader_.blocks_counted(status);
        for (nb::handle status : waiting) blocks += reader_.blocks_counted(status);
        Future& future = forecaster_.restart(blocks, running.size() + waiting.size());
        reader_.restore(future, running, waiting, cached, leave_at);
        forecaster_.restored();
        loaded_ = true;
    }

    void place(std::int64_t at_ns, std::int64_t prompt, std::int64_t output, std::int64_t final_tokens,
               std::int64_t sequences, std::int64_t cached) {
        check_loaded();
        forecaster_.place(at_ns, asked(prompt, output, final_tokens, sequences, cached));
    }

    void set_scale(double scale) {
        if (!(scale > 0) || std::isinf(scale)) throw std::invalid_argument("scale must be positive and finite");
        forecaster_.set_scale(scale);
    }

    nb::tuple ask(std::int64_t now_ns, std::int64_t prompt, std::int64_t output, std::int64_t final_tokens,
                  std::int64_t sequences, std::int64_t cached, bool with_delay) {
        check_loaded();
        const Asked one = asked(prompt, output, final_tokens, sequences, cached);
        const Answer answer = forecaster_.ask(now_ns, one, with_delay);
        return nb::make_tuple(to_python(answer.ttft), to_python(answer.e2e), to_python(answer.tpot_mean),
                              to_python(answer.tpot_worst), answer.blocks_peak, answer.preemptions, answer.others,
                              to_python(answer.others_delay));
    }

    // Rows of tokens, blocks, running, waiting, others, preemptions.
    nb::list curve(std::int64_t now_ns, std::int64_t spacing_ns, std::int64_t points) {
        check_loaded();
        counted(points, 1, "points");
        if (spacing_ns < 0) throw std::invalid_argument("a curve goes forward");
        nb::list rows;
        for (const Load& load : forecaster_.curve(now_ns, spacing_ns, points)) {
            rows.append(
                nb::make_tuple(load.tokens, load.blocks, load.running, load.waiting, load.others, load.preemptions));
        }
        return rows;
    }

    nb::object leave(std::int64_t now_ns, std::int64_t position) {
        check_loaded();
        const auto index = static_cast<std::size_t>(counted(position, 0, "position"));
        const std::optional<Departure> answer = forecaster_.leave(now_ns, index);
        if (!answer) return nb::none();
        return nb::make_tuple(to_python(answer->relieved), answer->preemptions_avoided, answer->others,
                              to_python(answer->rest));
    }

    nb::tuple join(std::int64_t now_ns, std::int64_t at_ns, std::int64_t prompt, std::int64_t output,
                   std::int64_t final_tokens) {
        check_loaded();
        const Coming answer = forecaster_.join(now_ns, at_ns, asked(prompt, output, final_tokens, 1, 0));
        return nb::make_tuple(to_python(answer.others_delay), answer.preemptions, answer.others, answer.blocks_peak,
                              to_python(answer.start), to_python(answer.e2e), to_python(answer.pace));
    }

private:
    void check_loaded() const {
        if (!loaded_) throw std::invalid_argument("no snapshot was loaded");
    }

    // Refuses what would never end: a sequence that the pool cannot hold, or that has ended already.
    Asked asked(std::int64_t prompt, std::int64_t output, std::int64_t final_tokens, std::int64_t sequences,
                std::int64_t cached) const {
        counted(prompt, 1, "prompt_tokens");
        counted(output, 0, "output_tokens");
        counted(sequences, 1, "sequences");
        if (final_tokens <= output || final_tokens > forecaster_.limits().max_model_len - prompt) {
            throw std::invalid_argument("the assumed output length is out of range");
        }
        counted(cached, 0, "cached", prompt + output - 1);
        return Asked{prompt, prompt + output, prompt + final_tokens, sequences, cached};
    }

    Forecaster forecaster_;
    SnapshotReader reader_;
    bool loaded_ = false;
};

}  // namespace

NB_MODULE(enginemodel, module) {
    // Changes with what Python calls (libs/millrace/native.py): a build of other sources is refused.
    module.attr("INTERFACE") = 6;
    nb::class_<StepCost>(module, "StepCost")
        .def(
            "__init__",
            [](StepCost* self, std::int64_t fixed, std::int64_t decode, std::int64_t prefill_token,
               std::int64_t context_token, std::int64_t tail_token, std::int64_t tail_decodes,
               std::int64_t prefill_half_work, std::int64_t mixed_decode, std::int64_t mixed_context_token,
               std::int64_t mixed_work, const std::vector<CurveTuple>& tokens, const std::vector<CurveTuple>& sequences,
               const std::vector<CurveTuple>& decode_context, const std::vector<CurveTuple>& prefill_work,
               const std::vector<CurveTuple>& mixed_context, std::int64_t prefill_granularity) {
                counted(prefill_granularity, 1, "prefill_granularity");
                new (self) StepCost{fixed,
                                    decode,
                                    prefill_token,
                                    context_token,
                                    tail_token,
                                    tail_decodes,
                                    prefill_half_work,
                                    mixed_decode,
                                    mixed_context_token,
                                    mixed_work,
                                    to_curves(tokens),
                                    to_curves(sequences),
                                    to_curves(decode_context),
                                    to_curves(prefill_work),
                                    to_curves(mixed_context),
                                    prefill_granularity};
            },
            nb::kw_only(), nb::arg("fixed"), nb::arg("decode"), nb::arg("prefill_token"), nb::arg("context_token"),
            nb::arg("tail_token"), nb::arg("tail_decodes"), nb::arg("prefill_half_work"), nb::arg("mixed_decode"),
            nb::arg("mixed_context_token"), nb::arg("mixed_work"), nb::arg("tokens"), nb::arg("sequences"),
            nb::arg("decode_context"), nb::arg("prefill_work"), nb::arg("mixed_context"),
            nb::arg("prefill_granularity"));
    nb::class_<Limits>(module, "Limits")
        .def(
            "__init__",
            [](Limits* self, std::int64_t max_model_len, std::int64_t block_size, std::int64_t max_sequences,
               std::int64_t token_budget, std::int64_t long_prefill_token_threshold, bool chunked_prefill,
               bool reserve_full_prompt, double watermark, bool async_scheduling,
               const std::vector<std::tuple<std::int64_t, std::int64_t>>& groups) {
                counted(max_model_len, 1, "max_model_len", MODEL_LEN_MAX);
                counted(block_size, 1, "block_size", BLOCK_SIZE_MAX);
                counted(max_sequences, 1, "max_sequences");
                counted(token_budget, 1, "token_budget");
                if (!chunked_prefill && token_budget < max_model_len) {
                    throw std::invalid_argument("token_budget is below max_model_len with chunked_prefill off");
                }
                if (!(watermark >= 0 && watermark < 1)) throw std::invalid_argument("watermark is out of range");
                const auto size = static_cast<std::uint64_t>(block_size);
                const int block_shift = std::has_single_bit(size) ? std::countr_zero(size) : -1;
                std::vector<BlockGroup> kept;
                for (const auto& [block_tokens, most] : groups) {
                    counted(block_tokens, 1, "block_tokens", MODEL_LEN_MAX);
                    kept.push_back({block_tokens, counted(most, 1, "most")});
                }
                new (self) Limits{
                    max_model_len,   block_size,          max_sequences, token_budget,     long_prefill_token_threshold,
                    chunked_prefill, reserve_full_prompt, watermark,     async_scheduling, block_shift,
                    std::move(kept)};
            },
            nb::kw_only(), nb::arg("max_model_len"), nb::arg("block_size"), nb::arg("max_sequences"),
            nb::arg("token_budget"), nb::arg("long_prefill_token_threshold"), nb::arg("chunked_prefill"),
            nb::arg("reserve_full_prompt"), nb::arg("watermark"), nb::arg("async_scheduling"),
            nb::arg("groups") = std::vector<std::tuple<std::int64_t, std::int64_t>>{});
    nb::class_<PyForecaster>(module, "Forecaster")
        .def(nb::init<const Limits&, const StepCost&, std::int64_t>())
        .def("load", &PyForecaster::load, nb::arg("running"), nb::arg("waiting"), nb::arg("blocks_free"),
             nb::arg("cached").none(), nb::arg("leave_at"))
        .def("place", &PyForecaster::place)
        .def("set_scale", &PyForecaster::set_scale)
        .def("ask", &PyForecaster::ask)
        .def("curve", &PyForecaster::curve)
        .def("leave", &PyForecaster::leave)
        .def("join", &PyForecaster::join);
    bind_replica(module);
}

}  // namespace millrace
