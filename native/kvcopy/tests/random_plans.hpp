// Layouts and block lists by chance, and what they mean without a planner.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "copy_pieces.hpp"
#include "planner.hpp"

namespace millrace::kvcopy::testing {

struct Case {
    std::vector<Panel> panels;
    std::vector<std::int64_t> source, target;
    std::int64_t region_bytes = 0;
};

// The next number below a bound, at least 1, from a seed or from a fuzzer's bytes.
using Draw = std::function<std::int64_t(std::int64_t)>;

// Panels that do not overlap within a region, over `blocks` blocks; no target block twice.
inline Case make_case(const Draw& draw) {
    Case made;
    const std::int64_t blocks = 1 + draw(40), panels = draw(6);
    std::int64_t source = draw(8), target = draw(8);
    for (std::int64_t index = 0; index < panels; ++index) {
        const std::int64_t bytes = 1 + draw(9);
        const std::int64_t source_stride = bytes + (draw(3) == 0 ? draw(4) : 0);
        const std::int64_t target_stride = bytes + (draw(3) == 0 ? draw(4) : 0);
        made.panels.push_back({source, source_stride, target, target_stride, bytes});
        source += blocks * source_stride + (draw(2) == 0 ? draw(5) : 0);
        target += blocks * target_stride + (draw(2) == 0 ? draw(5) : 0);
    }
    made.region_bytes = std::max(source, target);
    std::vector<std::int64_t> ids(static_cast<std::size_t>(blocks));
    std::iota(ids.begin(), ids.end(), 0);
    std::int64_t swaps = draw(blocks + 1);
    while (swaps-- > 0)
        std::swap(ids[static_cast<std::size_t>(draw(blocks))], ids[static_cast<std::size_t>(draw(blocks))]);
    if (draw(3) == 0) std::reverse(ids.begin(), ids.end());
    ids.resize(static_cast<std::size_t>(draw(blocks + 1)));
    const std::int64_t shift = draw(blocks);
    for (const std::int64_t id : ids) made.source.push_back(draw(8) == 0 ? draw(blocks) : (id + shift) % blocks);
    made.target = std::move(ids);
    return made;
}

inline std::vector<std::uint8_t> numbered(std::int64_t bytes) {
    std::vector<std::uint8_t> memory(static_cast<std::size_t>(bytes));
    for (std::size_t at = 0; at < memory.size(); ++at) memory[at] = static_cast<std::uint8_t>(1 + at * 7919 % 255);
    return memory;
}

inline std::vector<std::uint8_t> copied_naively(const Case& that) {
    const std::vector<std::uint8_t> source = numbered(that.region_bytes);
    std::vector<std::uint8_t> target(source.size());
    for (const Panel& panel : that.panels) {
        for (std::size_t pair = 0; pair < that.source.size(); ++pair) {
            const std::uint8_t* const from = source.data() + panel.source + that.source[pair] * panel.source_stride;
            std::memcpy(target.data() + panel.target + that.target[pair] * panel.target_stride, from,
                        static_cast<std::size_t>(panel.bytes));
        }
    }
    return target;
}

inline PlanView view_of(Pieces& pieces, std::uint64_t source_bytes, std::uint64_t target_bytes) {
    const std::size_t count = pieces.count();
    return {{pieces.source(), count}, {pieces.target(), count}, {pieces.lengths(), count}, source_bytes, target_bytes};
}

// What the plan copies, in steps of `step` bytes.
inline std::vector<std::uint8_t> copied_by_plan(const Case& that, std::int64_t step) {
    Pieces pieces = Planner(that.panels).plan(that.source, that.target);
    const std::vector<std::uint8_t> source = numbered(that.region_bytes);
    std::vector<std::uint8_t> target(source.size());
    const PlanView plan = view_of(pieces, source.size(), target.size());
    Position position{0, 0};
    while (position.piece < static_cast<std::int64_t>(pieces.count())) {
        position = copy_pieces(plan, position, source.data(), target.data(), step);
    }
    return target;
}

}  // namespace millrace::kvcopy::testing
