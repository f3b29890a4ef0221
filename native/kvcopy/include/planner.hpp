// Two block lists become the fewest pieces, as libs/millrace/kvcopy/plan.py says it; equal to it piece by piece.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace millrace::kvcopy {

// Within these, no sum or product below passes 64 bits. plan.py has the same.
constexpr std::int64_t BLOCK_IDS = std::int64_t{1} << 31;
constexpr std::int64_t STRIDE_MAX = std::int64_t{1} << 31;
constexpr std::int64_t OFFSET_MAX = std::int64_t{1} << 60;

// Planes that are contiguous within each block on both sides: block b is `bytes` at offset + b * stride.
struct Panel {
    std::int64_t source;
    std::int64_t source_stride;
    std::int64_t target;
    std::int64_t target_stride;
    std::int64_t bytes;

    bool dense() const { return bytes == source_stride && bytes == target_stride; }
};

// Three columns in one allocation that is left uninitialised: it may be megabytes, of which little is used.
class Pieces {
public:
    explicit Pieces(std::size_t capacity) : _columns(new std::int64_t[3 * capacity]), _capacity(capacity) {}

    std::int64_t* source() { return _columns.get(); }
    std::int64_t* target() { return _columns.get() + _capacity; }
    std::int64_t* lengths() { return _columns.get() + 2 * _capacity; }
    std::size_t count() const { return _count; }
    void set_count(std::size_t count) { _count = count; }

    // Gives up the memory; the columns stay where they are in it.
    std::int64_t* release() { return _columns.release(); }

private:
    std::unique_ptr<std::int64_t[]> _columns;
    std::size_t _capacity;
    std::size_t _count = 0;
};

class Planner {
public:
    // Throws std::invalid_argument: a panel is malformed.
    explicit Planner(std::vector<Panel> panels);

    // Pieces that copy source[i] to target[i]; a target block is named at most once. Const: threads may share it.
    // Throws std::invalid_argument: the lists differ in length, or an id is negative or above BLOCK_IDS.
    Pieces plan(std::span<const std::int64_t> source, std::span<const std::int64_t> target) const;

private:
    std::vector<Panel> _panels;
    std::size_t _dense = 0;
};

}  // namespace millrace::kvcopy
