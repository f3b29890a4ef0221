// For ThreadSanitizer: what Python's threads do at once, since the interpreter's lock is not held meanwhile.

#include <atomic>
#include <thread>

#include "checksum.hpp"
#include "expect.hpp"
#include "random_plans.hpp"

namespace millrace::kvcopy::testing {

namespace {

constexpr std::size_t THREADS = 4;
constexpr int ROUNDS = 200;

void on_every_thread(const std::function<void(std::size_t)>& body) {
    std::vector<std::thread> threads;
    for (std::size_t index = 0; index < THREADS; ++index) threads.emplace_back(body, index);
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST(threads_share_a_planner_and_checksums) {
    const Planner planner({{0, 8, 0, 8, 8}, {800, 16, 800, 16, 8}});
    const Checksums checksums({{0, 64, 64}});
    const std::vector<std::uint8_t> memory = numbered(6400);
    const std::vector<std::int64_t> source{5, 9, 6, 7}, target{1, 4, 2, 3};
    const std::vector<std::uint32_t> expected = checksums.of(memory, source);
    std::atomic<int> wrong = 0;
    on_every_thread([&](std::size_t) {
        for (int round = 0; round < ROUNDS; ++round) {
            if (planner.plan(source, target).count() != 6) ++wrong;
            if (checksums.of(memory, source) != expected) ++wrong;
        }
    });
    EXPECT(wrong == 0);
}

TEST(threads_copy_from_one_region_into_parts_of_another) {
    constexpr std::int64_t PART = 4096;
    const std::vector<std::uint8_t> source = numbered(PART);
    std::vector<std::uint8_t> target(static_cast<std::size_t>(PART) * THREADS);
    on_every_thread([&](std::size_t index) {
        const std::vector<std::int64_t> from{0}, to{static_cast<std::int64_t>(index) * PART}, lengths{PART};
        const PlanView plan{from, to, lengths, source.size(), target.size()};
        Position position{0, 0};
        while (position.piece == 0) position = copy_pieces(plan, position, source.data(), target.data(), 100);
    });
    for (std::size_t index = 0; index < THREADS; ++index) {
        EXPECT(std::equal(source.begin(), source.end(), target.begin() + static_cast<std::ptrdiff_t>(index) * PART));
    }
}

}  // namespace millrace::kvcopy::testing
