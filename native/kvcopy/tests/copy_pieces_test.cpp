#include "copy_pieces.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>

#include "expect.hpp"
#include "random_plans.hpp"

namespace millrace::kvcopy::testing {

namespace {

constexpr std::int64_t BYTES = 64 * 1024;

std::uint64_t address_of(const void* memory) { return reinterpret_cast<std::uint64_t>(memory); }

// Every second piece of 8 bytes, in reverse: more of them than the kernel takes in one call.
struct Scattered {
    std::vector<std::int64_t> source, target, lengths;

    Scattered() {
        for (std::int64_t at = 0; at < BYTES; at += 16) {
            source.push_back(at);
            target.push_back(BYTES - 8 - at);
            lengths.push_back(8);
        }
    }

    PlanView view() const { return {source, target, lengths, BYTES, BYTES}; }
};

// Reads out of this very process, in steps.
std::vector<std::uint8_t> read_out(const PlanView& plan, const std::vector<std::uint8_t>& source, std::int64_t step) {
    std::vector<std::uint8_t> target(static_cast<std::size_t>(BYTES));
    Position position{0, 0};
    while (position.piece < static_cast<std::int64_t>(plan.lengths.size())) {
        const RemoteRead read = read_pieces(plan, position, getpid(), address_of(source.data()), target.data(), step);
        EXPECT(read.error == 0);
        position = read.position;
    }
    return target;
}

}  // namespace

TEST(reading_a_process_gives_what_copying_gives) {
    const Scattered scattered;
    const std::vector<std::uint8_t> source = numbered(BYTES);
    std::vector<std::uint8_t> expected(source.size());
    copy_pieces(scattered.view(), {0, 0}, source.data(), expected.data(), BYTES);
    for (const std::int64_t step : {BYTES, std::int64_t{5000}, std::int64_t{13}}) {
        EXPECT(read_out(scattered.view(), source, step) == expected);
    }
}

TEST(long_pieces_arrive_whole_at_any_alignment_and_length) {
    const std::vector<std::uint8_t> source = numbered(BYTES);
    for (std::int64_t length = 1000; length < 1300; length += 7) {
        for (std::int64_t start = 0; start < 130; start += 13) {
            std::vector<std::uint8_t> target(source.size());
            const std::vector<std::int64_t> from{length % 50}, to{start}, lengths{length};
            copy_pieces({from, to, lengths, BYTES, BYTES}, {0, 0}, source.data(), target.data(), BYTES);
            const auto expected = source.begin() + from[0];
            EXPECT(std::equal(expected, expected + length, target.begin() + start));
            EXPECT(BYTES - std::count(target.begin(), target.end(), 0) == length);
        }
    }
}

TEST(a_step_copies_as_many_bytes_as_it_may) {
    const Scattered scattered;
    const std::vector<std::uint8_t> source = numbered(BYTES);
    std::vector<std::uint8_t> target(source.size());
    const Position reached = copy_pieces(scattered.view(), {0, 0}, source.data(), target.data(), 21);
    EXPECT(reached.piece == 2 && reached.done == 5);
    EXPECT(std::count(target.begin(), target.end(), 0) == BYTES - 21);
}

TEST(a_read_stops_where_the_memory_ends_and_says_so) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    auto* const mapped =
        static_cast<std::uint8_t*>(mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT(mapped != MAP_FAILED);
    std::fill(mapped, mapped + page, std::uint8_t{9});
    EXPECT(munmap(mapped + page, page) == 0);
    const std::vector<std::int64_t> start{0}, lengths{static_cast<std::int64_t>(2 * page)};
    std::vector<std::uint8_t> target(2 * page);
    const PlanView plan{start, start, lengths, 2 * page, 2 * page};
    const RemoteRead read = read_pieces(plan, {0, 0}, getpid(), address_of(mapped), target.data(), lengths[0]);
    EXPECT(read.error == EFAULT);
    EXPECT(read.position.piece == 0 && read.position.done == static_cast<std::int64_t>(page));
    EXPECT(target[page - 1] == 9 && target[page] == 0);
    EXPECT(munmap(mapped, page) == 0);
}

TEST(a_process_that_is_not_there_is_an_error) {
    const Scattered scattered;
    std::vector<std::uint8_t> target(static_cast<std::size_t>(BYTES));
    EXPECT(read_pieces(scattered.view(), {0, 0}, 0x3FFFFFFF, 4096, target.data(), 100).error == ESRCH);
}

TEST(a_piece_outside_a_region_is_refused_before_it_is_touched) {
    std::vector<std::uint8_t> source(100, 1), target(100);
    const std::vector<std::int64_t> good{0}, ten{10};
    for (const std::int64_t bad : {std::int64_t{91}, std::int64_t{-1}, INT64_MAX}) {
        const std::vector<std::int64_t> start{bad};
        EXPECT_THROWS(std::invalid_argument,
                      copy_pieces({start, good, ten, 100, 100}, {0, 0}, source.data(), target.data(), 9));
        EXPECT_THROWS(std::invalid_argument,
                      copy_pieces({good, start, ten, 100, 100}, {0, 0}, source.data(), target.data(), 9));
        EXPECT_THROWS(std::invalid_argument, read_pieces({good, start, ten, 100, 100}, {0, 0}, getpid(),
                                                         address_of(source.data()), target.data(), 9));
    }
    EXPECT(std::count(target.begin(), target.end(), 0) == 100);
}

TEST(a_position_that_is_none_of_the_plan_is_refused) {
    const std::vector<std::int64_t> zero{0}, five{5}, none;
    const PlanView plan{zero, zero, five, 100, 100};
    check(plan, {0, 4});
    check(plan, {1, 0});
    EXPECT_THROWS(std::invalid_argument, check(plan, {0, 5}));
    EXPECT_THROWS(std::invalid_argument, check(plan, {1, 1}));
    EXPECT_THROWS(std::invalid_argument, check(plan, {2, 0}));
    EXPECT_THROWS(std::invalid_argument, check(plan, {-1, 0}));
    EXPECT_THROWS(std::invalid_argument, check({zero, none, five, 100, 100}, {0, 0}));
}

}  // namespace millrace::kvcopy::testing
