#include "checksum.hpp"

#include <stdexcept>
#include <string_view>

#include "expect.hpp"
#include "random_plans.hpp"

namespace millrace::kvcopy::testing {

namespace {

const std::uint8_t* bytes_of(std::string_view text) { return reinterpret_cast<const std::uint8_t*>(text.data()); }

}  // namespace

TEST(the_check_value_is_the_published_one) {
    const std::string_view digits = "123456789";
    EXPECT(~crc32c_extend(~0U, bytes_of(digits), digits.size()) == 0xE3069283);
    EXPECT(~crc32c_extend_by_tables(~0U, bytes_of(digits), digits.size()) == 0xE3069283);
}

TEST(instruction_and_tables_agree_at_every_length_and_alignment) {
    const std::vector<std::uint8_t> memory = numbered(40'000);
    for (std::size_t length = 0; length < 1700; ++length) {
        const std::size_t start = length % 13;
        EXPECT(crc32c_extend(7, memory.data() + start, length) ==
               crc32c_extend_by_tables(7, memory.data() + start, length));
    }
    for (const std::size_t length : {12'287, 12'288, 12'289, 36'864, 39'000}) {
        EXPECT(crc32c_extend(~0U, memory.data() + 3, length) ==
               crc32c_extend_by_tables(~0U, memory.data() + 3, length));
    }
}

TEST(parts_one_after_the_other_make_the_whole) {
    const std::vector<std::uint8_t> memory = numbered(30'000);
    const std::uint32_t whole = crc32c_extend(~0U, memory.data(), memory.size());
    for (const std::size_t cut : {0, 1, 7, 4096, 12'288, 29'999}) {
        const std::uint32_t first = crc32c_extend(~0U, memory.data(), cut);
        EXPECT(crc32c_extend(first, memory.data() + cut, memory.size() - cut) == whole);
    }
}

TEST(a_shift_is_zero_bytes) {
    const std::vector<std::uint8_t> zeros(5000);
    for (const std::size_t length : {0, 1, 2, 3, 255, 256, 4999}) {
        EXPECT(crc32c_shift(0x12345678, length) == crc32c_extend_by_tables(0x12345678, zeros.data(), length));
    }
}

TEST(blocks_outside_the_memory_and_malformed_planes_are_refused) {
    const std::vector<std::uint8_t> memory(100);
    const std::vector<std::int64_t> last{9}, past{10}, negative{-1}, huge{INT64_MAX};
    const Checksums checksums({{0, 10, 10}});
    EXPECT(checksums.of(memory, last).size() == 1);
    EXPECT_THROWS(std::invalid_argument, checksums.of(memory, past));
    EXPECT_THROWS(std::invalid_argument, checksums.of(memory, negative));
    EXPECT_THROWS(std::invalid_argument, checksums.of(memory, huge));
    EXPECT_THROWS(std::invalid_argument, Checksums({{0, 10, 11}}));
    EXPECT_THROWS(std::invalid_argument, Checksums({{-1, 10, 10}}));
}

}  // namespace millrace::kvcopy::testing
