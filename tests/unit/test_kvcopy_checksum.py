"""CRC-32C: known values, any bytes as bit by bit, blocks over their planes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.contracts.kv import KvPlane, KvRank
from millrace.kvcopy.checksum import BlockChecksums
from millrace.kvcopy.memory import Bytes

POLYNOMIAL = 0x82F63B78


def whole(memory: Bytes) -> int:
    """Checksum of all of it, as one block."""
    rank = KvRank(planes=[KvPlane(0, len(memory), len(memory))], region_bytes=len(memory))
    return BlockChecksums(memory, rank).of([0])[0]


def bit_by_bit(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (POLYNOMIAL if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_the_check_value_is_the_published_one() -> None:
    assert bit_by_bit(b"123456789") == whole(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


@settings(max_examples=100)
@given(data=st.binary(min_size=1, max_size=300))
def test_any_bytes_as_bit_by_bit(data: bytes) -> None:
    assert whole(np.frombuffer(data, np.uint8)) == bit_by_bit(data)


@pytest.mark.parametrize("size", [767, 768, 769, 12_287, 12_288, 12_289, 13_063, 100_003])
def test_lengths_at_which_its_lanes_begin_and_end(size: int) -> None:
    memory = noise(size + 8, seed=size)
    for start in (0, 1, 5):
        assert whole(memory[start : start + size]) == bit_by_bit(memory[start : start + size].tobytes())


def test_a_block_is_its_planes_in_order() -> None:
    memory = noise(4000)
    planes = [KvPlane(2000, 40, 24), KvPlane(3, 16, 16), KvPlane(1000, 10, 7)]
    made = BlockChecksums(memory, KvRank(planes=planes, region_bytes=4000)).of([3, 0, 3])
    expected = [
        bit_by_bit(b"".join(memory[p.offset + b * p.stride :][: p.bytes].tobytes() for p in planes)) for b in (3, 0, 3)
    ]
    assert made == expected
    assert made[0] != made[1]


@pytest.mark.parametrize("block", [-1, 10, 1 << 40])
def test_a_block_outside_the_region_is_refused(block: int) -> None:
    memory = noise(100)
    rank = KvRank(planes=[KvPlane(0, 10, 10)], region_bytes=100)
    with pytest.raises(ValueError, match="outside the region"):
        BlockChecksums(memory, rank).of([9, block])
