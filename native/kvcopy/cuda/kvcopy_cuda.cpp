// Python's side: millrace_native.kvcopy_cuda, where a CUDA toolkit was there at build. Called from
// libs/millrace/kvcopy/cuda_copier.py, which turns the errors into its own.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "cuda_copy.hpp"

namespace nb = nanobind;

namespace millrace::kvcopy {

namespace {

constexpr int INTERFACE = 1;

nb::tuple export_region(std::uint64_t address, std::uint64_t bytes, int device) {
    const CudaHandle handle = cuda_export(address, bytes, device);
    return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(handle.ipc.data()), handle.ipc.size()),
                          handle.offset);
}

void make_mapping(CudaMapping* place, const nb::bytes& ipc, std::uint64_t offset, std::uint64_t bytes, int device) {
    CudaHandle handle{{}, offset};
    if (ipc.size() != handle.ipc.size()) throw std::invalid_argument("an IPC handle has another size");
    std::memcpy(handle.ipc.data(), ipc.c_str(), handle.ipc.size());
    const nb::gil_scoped_release released;
    new (place) CudaMapping(handle, bytes, device);
}

using Offsets = std::vector<std::int64_t>;

void make_transfer(CudaTransfer* place, Offsets source, Offsets target, Offsets lengths, std::uint64_t source_address,
                   std::uint64_t source_bytes, std::uint64_t target_address, std::uint64_t target_bytes, int device) {
    CudaPlan plan{std::move(source), std::move(target), std::move(lengths)};
    new (place) CudaTransfer(std::move(plan), source_address, source_bytes, target_address, target_bytes, device);
}

}  // namespace

}  // namespace millrace::kvcopy

NB_MODULE(kvcopy_cuda, module) {
    using namespace millrace::kvcopy;
    module.attr("INTERFACE") = INTERFACE;
    module.def("devices", &cuda_devices);
    module.def("export_region", &export_region);
    nb::class_<CudaMapping>(module, "Mapping")
        .def("__init__", &make_mapping)
        .def_prop_ro("address", &CudaMapping::address);
    nb::class_<CudaTransfer>(module, "Transfer")
        .def("__init__", &make_transfer)
        .def("advance", &CudaTransfer::advance, nb::call_guard<nb::gil_scoped_release>())
        .def("cancel", &CudaTransfer::cancel, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("launches", &CudaTransfer::launches);
}
