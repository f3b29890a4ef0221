// One engine under a list of arrivals (libs/millrace/enginemodel/forecast/replica.py): first and last token of each.
#include "replica.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "forecaster.hpp"

namespace nb = nanobind;

namespace millrace {

namespace {

// Times beyond 200 years of femtoseconds do not fit the answer.
constexpr std::int64_t REQUESTS_MAX = 1 << 24;

std::int64_t to_ns(Fs value) { return static_cast<std::int64_t>(value / FS_PER_NS); }

// `requests`: (arrival ns, prompt tokens, output tokens, prompt tokens whose KV comes along: whole blocks of it) in
// order of arrival. Returns (first token ns, end ns) of each.
std::vector<std::tuple<std::int64_t, std::int64_t>> simulate(
    const Limits& limits, const StepCost& cost, std::int64_t blocks,
    const std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>>& requests) {
    if (requests.size() > REQUESTS_MAX) throw std::invalid_argument("too many requests");
    if (blocks < limits.blocks_for(limits.max_model_len)) {
        throw std::invalid_argument("the blocks do not hold one sequence of max_model_len");
    }
    const double watermark = limits.watermark * static_cast<double>(blocks + 1);
    Future future(limits, blocks, static_cast<std::int64_t>(watermark));
    future.restored();
    std::int64_t before = 0;
    Tag tag = 0;
    for (const auto& [at, prompt, output, kv] : requests) {
        if (at < before || prompt < 1 || output < 1 || prompt > limits.max_model_len - output) {
            throw std::invalid_argument("a request is out of order or does not fit in max_model_len");
        }
        if (kv < 0 || kv >= prompt) throw std::invalid_argument("a request brings KV of more than its prompt");
        before = at;
        const std::int64_t cached = kv / limits.block_size * limits.block_size;
        future.arrive(Fs{at} * FS_PER_NS, Asked{prompt, prompt, prompt + output, 1, cached}.sequence(++tag));
    }
    future.watch.sequences.resize(requests.size());
    future.watch.left = requests.size();
    {
        const nb::gil_scoped_release released;
        future.finish(cost);
    }
    std::vector<std::tuple<std::int64_t, std::int64_t>> served;
    served.reserve(requests.size());
    for (const Watch::Tokens& tokens : future.watch.sequences)
        served.emplace_back(to_ns(tokens.first), to_ns(tokens.last));
    return served;
}

}  // namespace

void bind_replica(nb::module_& module) {
    module.def("simulate", &simulate, nb::arg("limits"), nb::arg("cost"), nb::arg("blocks"), nb::arg("requests"));
}

}  // namespace millrace
