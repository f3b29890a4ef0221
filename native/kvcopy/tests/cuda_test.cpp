// The logic of the CUDA copier on a fake runtime: what it hands over, when it is done, what it leaves behind.

#include <stdexcept>

#include "cuda_copy.hpp"
#include "expect.hpp"
#include "fake_cudart.hpp"
#include "random_plans.hpp"

namespace millrace::kvcopy::testing {

namespace {

constexpr std::uint64_t BYTES = 1 << 16;

// Both regions in the one allocation, the source 100 bytes into it.
struct Regions {
    std::vector<std::uint8_t> memory = numbered(3 * BYTES);
    std::uint64_t source, target;

    Regions() {
        fake_cuda() = FakeCuda{};
        fake_allocation(memory.data(), memory.size());
        source = reinterpret_cast<std::uint64_t>(memory.data()) + 100;
        target = source + BYTES;
        std::fill(memory.begin() + 100 + static_cast<std::ptrdiff_t>(BYTES), memory.end(), std::uint8_t{0});
    }

    CudaTransfer transfer(CudaPlan plan) const { return {std::move(plan), source, BYTES, target, BYTES, 0}; }

    std::size_t copied() const {
        const auto first = memory.begin() + 100 + static_cast<std::ptrdiff_t>(BYTES);
        return BYTES - static_cast<std::size_t>(std::count(first, first + BYTES, 0));
    }
};

// Many small pieces, mirrored.
CudaPlan mirrored(std::int64_t pieces, std::int64_t bytes) {
    CudaPlan plan;
    for (std::int64_t at = 0; at < pieces; ++at) {
        plan.source.push_back(at * bytes);
        plan.target.push_back((pieces - 1 - at) * bytes);
        plan.lengths.push_back(bytes);
    }
    return plan;
}

}  // namespace

TEST(a_gpu_that_is_not_there_is_told_with_the_runtimes_reason) {
    fake_cuda() = FakeCuda{};
    fake_cuda().devices = 0;
    EXPECT_THROWS(CudaError, cuda_devices());
    fake_cuda().devices = 2;
    EXPECT(cuda_devices() == 2);
}

TEST(an_exported_region_is_mapped_where_it_lies_in_its_allocation) {
    const Regions regions;
    const CudaHandle handle = cuda_export(regions.source, BYTES, 0);
    EXPECT(handle.offset == 100);
    {
        const CudaMapping mapping(handle, BYTES, 0);
        EXPECT(mapping.address() == regions.source);
        EXPECT(fake_cuda().mappings == 1);
    }
    EXPECT_THROWS(CudaError, CudaMapping(handle, 4 * BYTES, 0));
    EXPECT_THROWS(CudaError, cuda_export(regions.source, 4 * BYTES, 0));
    EXPECT_THROWS(CudaError, cuda_export(16, 1, 0));
    EXPECT(fake_is_clean());
}

TEST(a_transfer_copies_all_pieces_in_bounded_batches) {
    const Regions regions;
    {
        CudaTransfer transfer = regions.transfer(mirrored(8192, 8));
        std::size_t before = 0;
        for (int step = 0; !transfer.advance(10'000); ++step) {
            EXPECT(fake_cuda().batch_bytes - before <= 10'000);
            before = fake_cuda().batch_bytes;
            EXPECT(step < 100);
        }
        EXPECT(transfer.launches() == 7);
    }
    for (std::size_t at = 0; at < BYTES; ++at) {
        const std::size_t mirrored_at = BYTES - 8 - at / 8 * 8 + at % 8;
        EXPECT(regions.memory[100 + BYTES + mirrored_at] == regions.memory[100 + at]);
    }
    EXPECT(fake_is_clean());
}

TEST(a_batch_has_so_many_pieces_at_most) {
    const Regions regions;
    CudaTransfer transfer = regions.transfer(mirrored(8192, 8));
    transfer.advance(BYTES);
    EXPECT(fake_cuda().batch_bytes == 2048 * 8);
}

TEST(a_piece_larger_than_a_step_is_cut) {
    const Regions regions;
    CudaTransfer transfer = regions.transfer(mirrored(1, BYTES));
    EXPECT(!transfer.advance(1000));
    EXPECT(!transfer.advance(1000));
    while (!transfer.advance(1000)) EXPECT(regions.copied() < BYTES);
    EXPECT(regions.copied() == BYTES);
}

TEST(when_cancel_returns_nothing_is_under_way) {
    const Regions regions;
    CudaTransfer transfer = regions.transfer(mirrored(16, 4096));
    transfer.advance(8192);
    transfer.advance(8192);
    transfer.cancel();
    transfer.cancel();
    EXPECT(regions.copied() == fake_cuda().batch_bytes);
    EXPECT_THROWS(CudaError, transfer.advance(8192));
}

TEST(a_failed_copy_ends_the_transfer_and_leaves_nothing_behind) {
    const Regions regions;
    {
        CudaTransfer transfer = regions.transfer(mirrored(16, 4096));
        transfer.advance(8192);
        fake_cuda().fails = true;
        EXPECT_THROWS(CudaError, transfer.advance(8192));
        fake_cuda().fails = false;
        EXPECT_THROWS(CudaError, transfer.advance(8192));
    }
    EXPECT(fake_is_clean());
}

TEST(a_plan_outside_a_region_is_refused_before_anything_is_made) {
    const Regions regions;
    EXPECT_THROWS(std::invalid_argument, regions.transfer({{BYTES - 1}, {0}, {2}}));
    EXPECT_THROWS(std::invalid_argument, regions.transfer({{0}, {-1}, {2}}));
    EXPECT_THROWS(std::invalid_argument, regions.transfer({{0}, {0, 1}, {2}}));
    EXPECT_THROWS(std::invalid_argument, regions.transfer({{0}, {0}, {0}}));
    EXPECT(fake_is_clean());
}

TEST(an_empty_plan_is_done_at_once) {
    const Regions regions;
    EXPECT(regions.transfer({}).advance(1));
}

}  // namespace millrace::kvcopy::testing
