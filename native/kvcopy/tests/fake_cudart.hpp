// What tests set in the fake CUDA runtime, and see of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace millrace::kvcopy::testing {

struct FakeCuda {
    int devices = 1;
    bool fails = false;  // from now on every copy does
    int streams = 0;
    int mappings = 0;
    std::size_t batch_bytes = 0;  // handed over since it was last set
};

FakeCuda& fake_cuda();

// The one allocation that there is.
void fake_allocation(void* base, std::size_t bytes);

// No stream, event, mapping or work is left.
bool fake_is_clean();

}  // namespace millrace::kvcopy::testing
