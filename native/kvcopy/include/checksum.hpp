// CRC-32C (Castagnoli), as libs/millrace/kvcopy/checksum.py says it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace millrace::kvcopy {

// Takes bytes into a register that began as ~0 and is complemented in the end. Uses the processor's instruction where
// there is one.
std::uint32_t crc32c_extend(std::uint32_t state, const std::uint8_t* data, std::size_t bytes);

// The same by tables alone, for tests and other processors.
std::uint32_t crc32c_extend_by_tables(std::uint32_t state, const std::uint8_t* data, std::size_t bytes);

// What the register is after so many zero bytes.
std::uint32_t crc32c_shift(std::uint32_t state, std::size_t bytes);

struct Plane {
    std::int64_t offset;
    std::int64_t stride;
    std::int64_t bytes;
};

// Checksums of one layout's blocks. Const: threads may share it.
class Checksums {
public:
    // Throws std::invalid_argument: a plane is malformed.
    explicit Checksums(std::vector<Plane> planes);

    // One per block, over its planes in order. Throws std::invalid_argument: a block lies outside the memory.
    std::vector<std::uint32_t> of(std::span<const std::uint8_t> memory, std::span<const std::int64_t> blocks) const;

private:
    std::vector<Plane> _planes;
};

}  // namespace millrace::kvcopy
