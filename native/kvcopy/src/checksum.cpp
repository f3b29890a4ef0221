#include "checksum.hpp"

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace millrace::kvcopy {

namespace {

constexpr std::uint32_t POLYNOMIAL = 0x82F63B78;  // bits reversed

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

// Row k: what a byte does to the register when k further bytes follow it.
constexpr Table make_table() {
    Table table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t state = byte;
        for (int bit = 0; bit < 8; ++bit) state = (state & 1) ? (state >> 1) ^ POLYNOMIAL : state >> 1;
        table[0][byte] = state;
    }
    for (std::size_t row = 1; row < 8; ++row) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t state = table[row - 1][byte];
            table[row][byte] = table[0][state & 0xFF] ^ (state >> 8);
        }
    }
    return table;
}

constexpr Table TABLE = make_table();

// A linear operator on the register: the image of each bit.
using Operator = std::array<std::uint32_t, 32>;

constexpr std::uint32_t apply(const Operator& images, std::uint32_t state) {
    std::uint32_t result = 0;
    for (std::size_t bit = 0; state != 0; ++bit, state >>= 1) {
        if (state & 1) result ^= images[bit];
    }
    return result;
}

constexpr Operator squared(const Operator& images) {
    Operator result{};
    for (std::size_t bit = 0; bit < 32; ++bit) result[bit] = apply(images, images[bit]);
    return result;
}

// Of 2^k zero bytes, for every k that a length can have.
constexpr std::array<Operator, 48> make_zeros() {
    std::array<Operator, 48> zeros{};
    for (std::size_t bit = 0; bit < 32; ++bit) {
        const std::uint32_t state = std::uint32_t{1} << bit;
        zeros[0][bit] = TABLE[0][state & 0xFF] ^ (state >> 8);
    }
    for (std::size_t power = 1; power < zeros.size(); ++power) zeros[power] = squared(zeros[power - 1]);
    return zeros;
}

constexpr std::array<Operator, 48> ZEROS = make_zeros();

constexpr std::uint32_t shift(std::uint32_t state, std::size_t bytes) {
    for (std::size_t power = 0; bytes != 0; ++power, bytes >>= 1) {
        if (bytes & 1) state = apply(ZEROS[power], state);
    }
    return state;
}

// One operator as four look-ups, for shifts by a lane.
using Lookups = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr Lookups lookups_of(std::size_t bytes) {
    Lookups lookups{};
    for (std::size_t place = 0; place < 4; ++place) {
        for (std::uint32_t byte = 0; byte < 256; ++byte) lookups[place][byte] = shift(byte << (8 * place), bytes);
    }
    return lookups;
}

#if defined(__x86_64__)

// The instruction takes three cycles and starts every cycle: three lanes side by side fill it. Long lanes for few
// joins, short ones for what is left.
constexpr std::size_t LONG_LANE = 4096;
constexpr std::size_t SHORT_LANE = 256;
constexpr Lookups LONG_SHIFT = lookups_of(LONG_LANE);
constexpr Lookups SHORT_SHIFT = lookups_of(SHORT_LANE);

std::uint32_t looked_up(const Lookups& lookups, std::uint32_t state) {
    return lookups[0][state & 0xFF] ^ lookups[1][state >> 8 & 0xFF] ^ lookups[2][state >> 16 & 0xFF] ^
           lookups[3][state >> 24];
}

std::uint64_t word_at(const std::uint8_t* data) {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

__attribute__((target("sse4.2"))) std::uint32_t three_lanes(std::uint32_t state, const std::uint8_t* data,
                                                            std::size_t lane, const Lookups& shift_by_lane) {
    std::uint64_t first = state, second = 0, third = 0;
    for (std::size_t at = 0; at < lane; at += 8) {
        first = _mm_crc32_u64(first, word_at(data + at));
        second = _mm_crc32_u64(second, word_at(data + lane + at));
        third = _mm_crc32_u64(third, word_at(data + 2 * lane + at));
    }
    const std::uint32_t joined =
        looked_up(shift_by_lane, static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    return looked_up(shift_by_lane, joined) ^ static_cast<std::uint32_t>(third);
}

__attribute__((target("sse4.2"))) std::uint32_t extend_by_instruction(std::uint32_t state, const std::uint8_t* data,
                                                                      std::size_t bytes) {
    for (; bytes >= 3 * LONG_LANE; data += 3 * LONG_LANE, bytes -= 3 * LONG_LANE) {
        state = three_lanes(state, data, LONG_LANE, LONG_SHIFT);
    }
    for (; bytes >= 3 * SHORT_LANE; data += 3 * SHORT_LANE, bytes -= 3 * SHORT_LANE) {
        state = three_lanes(state, data, SHORT_LANE, SHORT_SHIFT);
    }
    std::uint64_t wide = state;
    for (; bytes >= 8; data += 8, bytes -= 8) wide = _mm_crc32_u64(wide, word_at(data));
    state = static_cast<std::uint32_t>(wide);
    for (; bytes != 0; ++data, --bytes) state = _mm_crc32_u8(state, *data);
    return state;
}

bool has_instruction() {
    static const bool has = __builtin_cpu_supports("sse4.2");
    return has;
}

#endif

}  // namespace

std::uint32_t crc32c_extend_by_tables(std::uint32_t state, const std::uint8_t* data, std::size_t bytes) {
    for (; bytes >= 8; data += 8, bytes -= 8) {
        std::uint32_t next = 0;
        for (std::size_t at = 0; at < 4; ++at) {
            next ^= TABLE[7 - at][(data[at] ^ (state >> (8 * at))) & 0xFF] ^ TABLE[3 - at][data[4 + at]];
        }
        state = next;
    }
    for (; bytes != 0; ++data, --bytes) state = TABLE[0][(state ^ *data) & 0xFF] ^ (state >> 8);
    return state;
}

std::uint32_t crc32c_extend(std::uint32_t state, const std::uint8_t* data, std::size_t bytes) {
#if defined(__x86_64__)
    if (has_instruction()) return extend_by_instruction(state, data, bytes);
#endif
    return crc32c_extend_by_tables(state, data, bytes);
}

std::uint32_t crc32c_shift(std::uint32_t state, std::size_t bytes) { return shift(state, bytes); }

Checksums::Checksums(std::vector<Plane> planes) : _planes(std::move(planes)) {
    for (const Plane& plane : _planes) {
        const bool good = 0 <= plane.offset && plane.offset <= OFFSET_MAX && 1 <= plane.bytes &&
                          plane.bytes <= plane.stride && plane.stride <= STRIDE_MAX;
        if (!good) throw std::invalid_argument("a plane is malformed: its offset, stride or bytes");
    }
}

std::vector<std::uint32_t> Checksums::of(std::span<const std::uint8_t> memory,
                                         std::span<const std::int64_t> blocks) const {
    std::vector<std::uint32_t> results;
    results.reserve(blocks.size());
    for (const std::int64_t block : blocks) {
        std::uint32_t state = ~std::uint32_t{0};
        for (const Plane& plane : _planes) {
            const bool is_id = 0 <= block && block < BLOCK_IDS;
            const std::int64_t start = is_id ? plane.offset + block * plane.stride : 0;
            if (!is_id || start + plane.bytes > static_cast<std::int64_t>(memory.size())) {
                throw std::invalid_argument("block " + std::to_string(block) + " lies outside the region of " +
                                            std::to_string(memory.size()) + " bytes");
            }
            state = crc32c_extend(state, memory.data() + start, static_cast<std::size_t>(plane.bytes));
        }
        results.push_back(~state);
    }
    return results;
}

}  // namespace millrace::kvcopy
