// Carrying out a plan between mapped regions.
#pragma once

#include <cstdint>
#include <span>

namespace millrace::kvcopy {

// A plan with the sizes of the regions that it moves between.
struct PlanView {
    std::span<const std::int64_t> source;
    std::span<const std::int64_t> target;
    std::span<const std::int64_t> lengths;
    std::uint64_t source_bytes;
    std::uint64_t target_bytes;
};

// How far it has come: pieces done, and bytes of the next one.
struct Position {
    std::int64_t piece;
    std::int64_t done;
};

// Throws std::invalid_argument: the columns differ in length, or the position is none of this plan.
void check(const PlanView& plan, Position position);

// Goes on for at most bytes_max; returns the position reached. Throws std::invalid_argument at a piece that is empty or
// outside a region: nothing of it is copied.
Position copy_pieces(const PlanView& plan, Position position, const std::uint8_t* source, std::uint8_t* target,
                     std::int64_t bytes_max);

}  // namespace millrace::kvcopy
