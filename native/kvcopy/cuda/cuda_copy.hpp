// Reads out of another process's GPU memory: IPC handles, peer copies in batches on a stream of their own.
//
// Only the runtime's library is needed, linked statically: a machine without a driver loads the module and is told why
// nothing works. There is no device code, so any C++ compiler will do.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace millrace::kvcopy {

struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Number of GPUs. Throws CudaError: no driver, or none that fits.
int cuda_devices();

// What a peer needs to map memory of this process.
struct CudaHandle {
    std::array<std::uint8_t, sizeof(cudaIpcMemHandle_t)> ipc;  // of the whole allocation
    std::uint64_t offset;                                      // of the region in it
};

// Throws CudaError: the memory cannot be exported (what the virtual memory API allocated, torch's expandable segments
// among it, has no such handle).
CudaHandle cuda_export(std::uint64_t address, std::uint64_t bytes, int device);

// A peer's region, mapped for one of our GPUs.
class CudaMapping {
public:
    CudaMapping(const CudaHandle& handle, std::uint64_t bytes, int device);
    CudaMapping(const CudaMapping&) = delete;
    CudaMapping& operator=(const CudaMapping&) = delete;
    ~CudaMapping();

    std::uint64_t address() const { return _address; }

private:
    void* _base = nullptr;
    std::uint64_t _address = 0;
    int _device;
};

struct CudaPlan {
    std::vector<std::int64_t> source, target, lengths;
};

// One read under way. Batches are bounded in bytes and pieces, and in number.
class CudaTransfer {
public:
    // Throws std::invalid_argument: a piece lies outside its region.
    CudaTransfer(CudaPlan plan, std::uint64_t source, std::uint64_t source_bytes, std::uint64_t target,
                 std::uint64_t target_bytes, int device);
    CudaTransfer(const CudaTransfer&) = delete;
    CudaTransfer& operator=(const CudaTransfer&) = delete;
    ~CudaTransfer();

    // Looks which batches are done and hands at most bytes_max more to the GPU; never waits. Returns whether all is
    // there. Throws CudaError: it failed, and nothing writes any more.
    bool advance(std::int64_t bytes_max);

    // Waits for the batches handed over; nothing writes afterwards.
    void cancel() noexcept;

    std::int64_t launches() const { return _launches; }

private:
    void submit(std::int64_t bytes_max);
    void launch(std::vector<void*>& targets, std::vector<const void*>& sources, std::vector<std::size_t>& sizes);

    CudaPlan _plan;
    std::uint64_t _source, _target;
    int _device;
    std::size_t _piece = 0;
    std::int64_t _done = 0;
    std::int64_t _launches = 0;
    bool _over = false;
    cudaStream_t _stream = nullptr;
    std::deque<cudaEvent_t> _batches;
};

}  // namespace millrace::kvcopy
