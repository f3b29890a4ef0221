"""Messages between RDMA peers before the first READ: frames that anybody on the network may send."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.kvcopy.copier import CopierError
from millrace.kvcopy.verbs_device import PairAddress
from millrace.kvcopy.verbs_listener import FRAME_BYTES_MAX, Greeting, frame_of, split_frame

ADDRESS = PairAddress(number=17, sequence=0xABCDEF, lid=0, gid=bytes(range(16)), mtu=3, reads=16)


@given(st.integers(0, 200))
def test_a_frame_is_whole_only_with_its_last_byte(cut: int) -> None:
    frame = frame_of(Greeting(b"token", ADDRESS))
    part = frame[: min(cut, len(frame))]
    body = split_frame(part)
    assert (body is None) == (len(part) < len(frame))
    if body is not None:
        assert msgspec.msgpack.decode(body, type=Greeting) == Greeting(b"token", ADDRESS)


def test_bytes_behind_a_frame_are_refused() -> None:
    with pytest.raises(CopierError):
        split_frame(frame_of(ADDRESS) + b"x")


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(CopierError):
        split_frame(struct.pack("<I", FRAME_BYTES_MAX + 1))


def test_a_greeting_fits_a_frame() -> None:
    assert len(frame_of(Greeting(bytes(16), ADDRESS))) < FRAME_BYTES_MAX


@given(st.binary(max_size=64))
def test_whatever_comes_is_a_frame_or_more_to_wait_for_or_an_error(received: bytes) -> None:
    try:
        body = split_frame(received)
    except CopierError:
        return
    assert body is None or received == struct.pack("<I", len(body)) + body
