#include "planner.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace millrace::kvcopy {

namespace {

// Pairs that follow each other on both sides.
struct Run {
    std::uint64_t key;  // target - source, then source: runs that continue each other become neighbours by sorting
    std::int64_t source;
    std::int64_t target;
    std::int64_t blocks;
};

std::uint64_t key_of(std::int64_t source, std::int64_t target) {
    const auto shift = static_cast<std::uint64_t>(target - source + BLOCK_IDS);
    return shift << 32 | static_cast<std::uint64_t>(source);
}

void check(const Panel& panel) {
    const bool offsets =
        0 <= panel.source && panel.source <= OFFSET_MAX && 0 <= panel.target && panel.target <= OFFSET_MAX;
    const bool strides = panel.source_stride <= STRIDE_MAX && panel.target_stride <= STRIDE_MAX;
    const bool bytes = 1 <= panel.bytes && panel.bytes <= panel.source_stride && panel.bytes <= panel.target_stride;
    if (!offsets || !strides || !bytes)
        throw std::invalid_argument("a plane is malformed: its offset, stride or bytes");
}

void check(std::int64_t block) {
    if (block < 0 || block >= BLOCK_IDS) throw std::invalid_argument("block id " + std::to_string(block) + " is none");
}

// In the order of the lists.
std::vector<Run> runs_of(std::span<const std::int64_t> source, std::span<const std::int64_t> target) {
    std::vector<Run> runs;
    runs.reserve(source.size());
    for (std::size_t index = 0; index < source.size(); ++index) {
        const std::int64_t here = source[index], there = target[index];
        check(here);
        check(there);
        if (!runs.empty()) {
            Run& last = runs.back();
            if (last.source + last.blocks == here && last.target + last.blocks == there) {
                ++last.blocks;
                continue;
            }
        }
        runs.push_back({key_of(here, there), here, there, 1});
    }
    return runs;
}

// Sorts them and joins those that continue each other.
void align(std::vector<Run>& runs) {
    const auto before = [](const Run& one, const Run& other) { return one.key < other.key; };
    if (std::is_sorted(runs.begin(), runs.end(), before)) return;
    std::sort(runs.begin(), runs.end(), before);
    std::size_t kept = 0;
    for (std::size_t index = 1; index < runs.size(); ++index) {
        Run& last = runs[kept];
        const Run& next = runs[index];
        if (last.source + last.blocks == next.source && last.target + last.blocks == next.target) {
            last.blocks += next.blocks;
        } else {
            runs[++kept] = next;
        }
    }
    runs.resize(kept + 1);
}

// Writes one panel's pieces behind those that are there. Within a panel no two pieces touch on both sides: runs are
// maximal, and where a panel is not dense there is a gap after each block on one side.
class Writer {
public:
    explicit Writer(Pieces& pieces) : _source(pieces.source()), _target(pieces.target()), _lengths(pieces.lengths()) {}

    void write_runs(const Panel& panel, const std::vector<Run>& runs) {
        const std::size_t first = _count;
        for (const Run& run : runs) put(panel, run.source, run.target, run.blocks * panel.bytes);
        join(first);
    }

    void write_blocks(const Panel& panel, const std::vector<Run>& runs) {
        const std::size_t first = _count;
        for (const Run& run : runs) {
            for (std::int64_t block = 0; block < run.blocks; ++block) {
                put(panel, run.source + block, run.target + block, panel.bytes);
            }
        }
        join(first);
    }

    std::size_t count() const { return _count; }

private:
    void put(const Panel& panel, std::int64_t source, std::int64_t target, std::int64_t bytes) {
        _source[_count] = panel.source + source * panel.source_stride;
        _target[_count] = panel.target + target * panel.target_stride;
        _lengths[_count++] = bytes;
    }

    // A run that ends with its plane continues where the next plane begins.
    void join(std::size_t first) {
        if (first == 0) return;
        const std::size_t last = first - 1;
        const bool touches =
            _source[last] + _lengths[last] == _source[first] && _target[last] + _lengths[last] == _target[first];
        if (!touches) return;
        _lengths[last] += _lengths[first];
        for (std::int64_t* column : {_source, _target, _lengths}) {
            std::copy(column + first + 1, column + _count, column + first);
        }
        --_count;
    }

    std::int64_t* _source;
    std::int64_t* _target;
    std::int64_t* _lengths;
    std::size_t _count = 0;
};

}  // namespace

Planner::Planner(std::vector<Panel> panels) : _panels(std::move(panels)) {
    for (const Panel& panel : _panels) check(panel);
    _dense = static_cast<std::size_t>(
        std::count_if(_panels.begin(), _panels.end(), [](const Panel& panel) { return panel.dense(); }));
}

Pieces Planner::plan(std::span<const std::int64_t> source, std::span<const std::int64_t> target) const {
    if (source.size() != target.size()) {
        throw std::invalid_argument(std::to_string(source.size()) + " source blocks for " +
                                    std::to_string(target.size()) + " target blocks");
    }
    std::vector<Run> runs = runs_of(source, target);
    if (runs.empty()) return Pieces(0);
    align(runs);
    Pieces pieces(_dense * runs.size() + (_panels.size() - _dense) * source.size());
    Writer writer(pieces);
    for (const Panel& panel : _panels) {
        if (panel.dense()) {
            writer.write_runs(panel, runs);
        } else {
            writer.write_blocks(panel, runs);
        }
    }
    pieces.set_count(writer.count());
    return pieces;
}

}  // namespace millrace::kvcopy
