// A CUDA runtime on host memory, for the logic around it: work handed to a stream is done when an event is asked for a
// second time, or the stream is waited for. One process plays both ends.

#include "fake_cudart.hpp"

#include <cuda.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>

namespace {

struct Allocation {
    std::uint64_t base;
    std::size_t bytes;
};

Allocation allocation{0, 0};
int device = 0;
std::deque<std::function<void()>> work;  // of the one stream, in order
std::map<cudaEvent_t, int> events;       // asked how often
std::map<cudaEvent_t, std::size_t> marks;
std::size_t handed_over = 0, carried_out = 0;

void run_until(std::size_t mark) {
    while (carried_out < mark && !work.empty()) {
        work.front()();
        work.pop_front();
        ++carried_out;
    }
}

CUresult range_of(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) {
    if (address < allocation.base || address >= allocation.base + allocation.bytes) return CUDA_ERROR_INVALID_VALUE;
    *base = allocation.base;
    *bytes = allocation.bytes;
    return CUDA_SUCCESS;
}

}  // namespace

namespace millrace::kvcopy::testing {

FakeCuda& fake_cuda() {
    static FakeCuda fake;
    return fake;
}

void fake_allocation(void* base, std::size_t bytes) { allocation = {reinterpret_cast<std::uint64_t>(base), bytes}; }

bool fake_is_clean() { return events.empty() && fake_cuda().streams == 0 && fake_cuda().mappings == 0 && work.empty(); }

}  // namespace millrace::kvcopy::testing

using millrace::kvcopy::testing::fake_cuda;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    *count = fake_cuda().devices;
    return fake_cuda().devices > 0 ? cudaSuccess : cudaErrorInsufficientDriver;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t status) {
    return status == cudaErrorInsufficientDriver ? "no driver" : "failed";
}

cudaError_t cudaGetDevice(int* current) {
    *current = device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int chosen) {
    device = chosen;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *found = reinterpret_cast<void*>(&range_of);
    *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* base) {
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &base, sizeof base);
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** base, cudaIpcMemHandle_t handle, unsigned int) {
    std::memcpy(base, &handle, sizeof *base);
    ++fake_cuda().mappings;
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void*) {
    --fake_cuda().mappings;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
    *stream = reinterpret_cast<cudaStream_t>(static_cast<std::uintptr_t>(++fake_cuda().streams));
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t) {
    --fake_cuda().streams;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
    run_until(handed_over);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
    static std::uintptr_t last = 0;
    *event = reinterpret_cast<cudaEvent_t>(++last);
    events[*event] = 0;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    events.erase(event);
    marks.erase(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    marks[event] = handed_over;
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (fake_cuda().fails) return cudaErrorIllegalAddress;
    if (++events[event] < 2) return cudaErrorNotReady;
    run_until(marks[event]);
    return cudaSuccess;
}

cudaError_t cudaMemcpyBatchAsync(void* const* targets, const void* const* sources, const std::size_t* sizes,
                                 std::size_t count, cudaMemcpyAttributes*, std::size_t*, std::size_t, cudaStream_t) {
    for (std::size_t at = 0; at < count; ++at) {
        void* const target = targets[at];
        const void* const source = sources[at];
        const std::size_t bytes = sizes[at];
        fake_cuda().batch_bytes += bytes;
        work.emplace_back([=] { std::memcpy(target, source, bytes); });
        ++handed_over;
    }
    return cudaSuccess;
}

}  // extern "C"
