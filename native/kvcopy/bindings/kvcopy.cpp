// Python's side of the copier: millrace_native.kvcopy. Called from libs/millrace/kvcopy/native.py; what would read or
// write outside the memory that was handed in is refused here.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "checksum.hpp"
#include "copy_pieces.hpp"
#include "planner.hpp"

namespace nb = nanobind;

namespace millrace::kvcopy {

namespace {

constexpr int INTERFACE = 1;

using Column = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Readable = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Writable = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Made = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

std::span<const std::int64_t> span_of(const Column& column) { return {column.data(), column.size()}; }

// Block ids of a list (the usual case, read in place) or of any sequence.
std::vector<std::int64_t> block_ids(nb::handle blocks) {
    const nb::object fast = nb::steal(PySequence_Fast(blocks.ptr(), "block ids come in a list"));
    if (!fast.is_valid()) throw nb::python_error();
    const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
    PyObject** const items = PySequence_Fast_ITEMS(fast.ptr());
    std::vector<std::int64_t> ids(count);
    for (std::size_t index = 0; index < count; ++index) {
        ids[index] = PyLong_AsLongLong(items[index]);
        if (ids[index] == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    }
    return ids;
}

using PanelTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

void make_planner(Planner* place, const std::vector<PanelTuple>& rows) {
    std::vector<Panel> panels;
    panels.reserve(rows.size());
    for (const auto& [source, source_stride, target, target_stride, bytes] : rows) {
        panels.push_back({source, source_stride, target, target_stride, bytes});
    }
    new (place) Planner(std::move(panels));
}

nb::tuple plan(const Planner& planner, nb::handle source, nb::handle target) {
    const std::vector<std::int64_t> sources = block_ids(source);
    const std::vector<std::int64_t> targets = block_ids(target);
    Pieces pieces = planner.plan(sources, targets);
    std::int64_t* const columns[] = {pieces.source(), pieces.target(), pieces.lengths()};
    const std::size_t count = pieces.count();
    const nb::capsule owner(pieces.release(),
                            [](void* memory) noexcept { delete[] static_cast<std::int64_t*>(memory); });
    const auto made = [&](std::int64_t* column) { return nb::cast(Made(column, {count}, owner)); };
    return nb::make_tuple(made(columns[0]), made(columns[1]), made(columns[2]));
}

using PlaneTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

void make_checksums(Checksums* place, const std::vector<PlaneTuple>& rows) {
    std::vector<Plane> planes;
    planes.reserve(rows.size());
    for (const auto& [offset, stride, bytes] : rows) planes.push_back({offset, stride, bytes});
    new (place) Checksums(std::move(planes));
}

std::vector<std::uint32_t> checksums_of(const Checksums& checksums, const Readable& memory, nb::handle blocks) {
    const std::vector<std::int64_t> ids = block_ids(blocks);
    const nb::gil_scoped_release released;
    return checksums.of({memory.data(), memory.size()}, ids);
}

using Pair = std::pair<std::int64_t, std::int64_t>;

Pair copy_mapped(const Column& sources, const Column& targets, const Column& lengths, const Readable& source,
                 const Writable& target, Pair position, std::int64_t bytes_max) {
    const PlanView plan{span_of(sources), span_of(targets), span_of(lengths), source.size(), target.size()};
    const Position from{position.first, position.second};
    check(plan, from);
    const nb::gil_scoped_release released;
    const Position reached = copy_pieces(plan, from, source.data(), target.data(), bytes_max);
    return {reached.piece, reached.done};
}

}  // namespace

}  // namespace millrace::kvcopy

NB_MODULE(kvcopy, module) {
    using namespace millrace::kvcopy;
    module.attr("INTERFACE") = INTERFACE;
    nb::class_<Planner>(module, "Planner").def("__init__", &make_planner).def("plan", &plan);
    nb::class_<Checksums>(module, "Checksums").def("__init__", &make_checksums).def("of", &checksums_of);
    module.def("copy_pieces", &copy_mapped);
}
