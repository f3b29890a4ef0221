#include "cuda_copy.hpp"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace millrace::kvcopy {

namespace {

// Handing over costs some 0.1 to 1 us a piece: a call stays well under a decode step.
constexpr std::size_t PIECES_PER_BATCH = 2048;
// One runs while the next waits; more would only make cancel wait longer.
constexpr std::size_t BATCHES_IN_FLIGHT = 2;

void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // or it would be reported again by whoever asks next, such as torch
    throw CudaError(std::string(what) + ": " + cudaGetErrorString(status));
}

// The device of this thread, put back in the end: torch's is not ours to change.
class OnDevice {
public:
    explicit OnDevice(int device) {
        check(cudaGetDevice(&_before), "which GPU this thread uses");
        check(cudaSetDevice(device), "choosing the GPU");
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    ~OnDevice() { cudaSetDevice(_before); }

private:
    int _before = 0;
};

using AddressRange = CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr);

// The driver's call, through the runtime: linking the driver's library would make this module need it to load.
AddressRange address_range() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 13000
    check(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found, 12000, cudaEnableDefault, &result),
          "looking up cuMemGetAddressRange");
#else
    check(cudaGetDriverEntryPoint("cuMemGetAddressRange", &found, cudaEnableDefault, &result),
          "looking up cuMemGetAddressRange");
#endif
    if (found == nullptr || result != cudaDriverEntryPointSuccess)
        throw CudaError("the driver has no cuMemGetAddressRange");
    return reinterpret_cast<AddressRange>(found);
}

bool inside(std::int64_t offset, std::int64_t length, std::uint64_t bytes) {
    if (offset < 0 || length < 1) return false;
    const auto size = static_cast<std::uint64_t>(length);
    return size <= bytes && static_cast<std::uint64_t>(offset) <= bytes - size;
}

}  // namespace

int cuda_devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "counting GPUs");
    return count;
}

CudaHandle cuda_export(std::uint64_t address, std::uint64_t bytes, int device) {
    const OnDevice on(device);
    CUdeviceptr base = 0;
    std::size_t size = 0;
    if (address_range()(&base, &size, static_cast<CUdeviceptr>(address)) != CUDA_SUCCESS) {
        throw CudaError("the region is no memory of a GPU");
    }
    const std::uint64_t offset = address - static_cast<std::uint64_t>(base);
    if (offset > size || bytes > size - offset) throw CudaError("the region reaches past its allocation");
    cudaIpcMemHandle_t ipc;
    check(cudaIpcGetMemHandle(&ipc, reinterpret_cast<void*>(base)),
          "exporting the region (torch must not use expandable_segments for it)");
    CudaHandle handle{{}, offset};
    std::memcpy(handle.ipc.data(), &ipc, sizeof ipc);
    return handle;
}

CudaMapping::CudaMapping(const CudaHandle& handle, std::uint64_t bytes, int device) : _device(device) {
    const OnDevice on(device);
    cudaIpcMemHandle_t ipc;
    std::memcpy(&ipc, handle.ipc.data(), sizeof ipc);
    check(cudaIpcOpenMemHandle(&_base, ipc, cudaIpcMemLazyEnablePeerAccess), "mapping the peer's memory");
    _address = reinterpret_cast<std::uint64_t>(_base) + handle.offset;
    CUdeviceptr base = 0;
    std::size_t size = 0;
    const CUresult known = address_range()(&base, &size, reinterpret_cast<CUdeviceptr>(_base));
    if (known == CUDA_SUCCESS && handle.offset <= size && bytes <= size - handle.offset) return;
    cudaIpcCloseMemHandle(_base);
    throw CudaError("the peer's allocation is smaller than it announced");
}

CudaMapping::~CudaMapping() {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(_device);
    cudaIpcCloseMemHandle(_base);
    cudaSetDevice(before);
}

CudaTransfer::CudaTransfer(CudaPlan plan, std::uint64_t source, std::uint64_t source_bytes, std::uint64_t target,
                           std::uint64_t target_bytes, int device)
    : _plan(std::move(plan)), _source(source), _target(target), _device(device) {
    const std::size_t count = _plan.lengths.size();
    bool good = _plan.source.size() == count && _plan.target.size() == count;
    for (std::size_t at = 0; good && at < count; ++at) {
        good = inside(_plan.source[at], _plan.lengths[at], source_bytes) &&
               inside(_plan.target[at], _plan.lengths[at], target_bytes);
    }
    if (!good) throw std::invalid_argument("the plan reaches outside a region");
    const OnDevice on(device);
    // Non-blocking: it does not wait for the engine's kernels on the legacy stream, nor they for it.
    check(cudaStreamCreateWithFlags(&_stream, cudaStreamNonBlocking), "making a stream");
}

CudaTransfer::~CudaTransfer() {
    cancel();
    cudaStreamDestroy(_stream);
}

bool CudaTransfer::advance(std::int64_t bytes_max) {
    if (_over) throw CudaError("the transfer was cancelled, or has failed before");
    try {
        const OnDevice on(_device);
        while (!_batches.empty()) {
            const cudaError_t status = cudaEventQuery(_batches.front());
            if (status == cudaErrorNotReady) {
                cudaGetLastError();
                break;
            }
            check(status, "copying");
            cudaEventDestroy(_batches.front());
            _batches.pop_front();
        }
        if (_piece < _plan.lengths.size() && _batches.size() < BATCHES_IN_FLIGHT) submit(bytes_max);
        return _piece == _plan.lengths.size() && _batches.empty();
    } catch (...) {
        cancel();
        throw;
    }
}

void CudaTransfer::submit(std::int64_t bytes_max) {
    std::vector<void*> targets;
    std::vector<const void*> sources;
    std::vector<std::size_t> sizes;
    while (_piece < _plan.lengths.size() && bytes_max > 0 && sizes.size() < PIECES_PER_BATCH) {
        const std::int64_t bytes = std::min(_plan.lengths[_piece] - _done, bytes_max);
        targets.push_back(reinterpret_cast<void*>(_target + static_cast<std::uint64_t>(_plan.target[_piece] + _done)));
        sources.push_back(reinterpret_cast<void*>(_source + static_cast<std::uint64_t>(_plan.source[_piece] + _done)));
        sizes.push_back(static_cast<std::size_t>(bytes));
        bytes_max -= bytes;
        _done += bytes;
        if (_done == _plan.lengths[_piece]) {
            ++_piece;
            _done = 0;
        }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    _batches.push_back(event);
    launch(targets, sources, sizes);
    check(cudaEventRecord(event, _stream), "marking the end of a batch");
}

void CudaTransfer::launch(std::vector<void*>& targets, std::vector<const void*>& sources,
                          std::vector<std::size_t>& sizes) {
    ++_launches;
#if CUDART_VERSION >= 12080
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    check(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first, 1,
                               _stream),
          "handing over a batch of copies");
#else
    std::vector<void*> writable(sources.size());
    std::transform(sources.begin(), sources.end(), writable.begin(),
                   [](const void* at) { return const_cast<void*>(at); });
    std::size_t failed = 0;
    check(cudaMemcpyBatchAsync(targets.data(), writable.data(), sizes.data(), sizes.size(), &attributes, &first, 1,
                               &failed, _stream),
          "handing over a batch of copies");
#endif
#else
    for (std::size_t at = 0; at < sizes.size(); ++at) {
        check(cudaMemcpyAsync(targets[at], sources[at], sizes[at], cudaMemcpyDefault, _stream), "handing over a copy");
    }
#endif
}

void CudaTransfer::cancel() noexcept {
    _over = true;
    if (_batches.empty()) return;
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(_device);
    cudaStreamSynchronize(_stream);
    for (const cudaEvent_t event : _batches) cudaEventDestroy(event);
    _batches.clear();
    cudaSetDevice(before);
}

}  // namespace millrace::kvcopy
