"""The Copier port: what holds for every way of reading another engine's KV, between real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import msgspec
import numpy as np
import pytest
from millrace.contracts.kv import CopierKind
from millrace.kvcopy import nixl_agent
from millrace.kvcopy.copier_port import CopierError, CopyPlan, Transfer

from tests.contract.copier import sides
from tests.contract.copier.conftest import Peer
from tests.contract.copier.sides import BLOCK_BYTES, BLOCKS, PLANES, REGION_BYTES, Side, pattern, plan

Mortals = Callable[[], Peer]

#: Bounds the steps of a transfer that never finishes.
STEPS_MAX = 10_000


def finish(transfer: Transfer, bytes_max: int = 1 << 20) -> int:
    """Carries it out; the steps that it took."""
    for step in range(1, STEPS_MAX):
        if transfer.advance(bytes_max):
            return step
    raise AssertionError("the transfer never finishes")


def piece(source: int, target: int, length: int) -> CopyPlan:
    columns = [np.array([value], dtype=np.int64) for value in (source, target, length)]
    return CopyPlan(source=columns[0], target=columns[1], lengths=columns[2])


def blocks_of(memory: np.ndarray, block: int) -> list[bytes]:
    """A block's bytes in each plane."""
    starts = [(plane * BLOCKS + block) * BLOCK_BYTES for plane in range(PLANES)]
    return [memory[start : start + BLOCK_BYTES].tobytes() for start in starts]


def descriptors_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_blocks_arrive_whole_and_nothing_else_changes(own: Side, peer: Peer) -> None:
    source, target = [5, 6, 7, 40, 3], [20, 21, 22, 0, 63]
    link = own.copier.connect(peer.ranks[0])
    finish(link.begin(plan(peer.ranks[0], source, own.rank, target)))
    theirs = pattern(1)
    for here, there in zip(target, source, strict=True):
        assert blocks_of(own.memory, here) == blocks_of(theirs, there)
    for untouched in set(range(BLOCKS)) - set(target):
        assert not any(map(any, blocks_of(own.memory, untouched)))


def test_an_owner_reads_its_own_region_as_an_engines_self_test_does(kind: CopierKind, tmp_path: Path) -> None:
    side = sides.make(kind, tmp_path, "own", seed=1)
    try:
        link = side.copier.connect(side.rank)
        finish(link.begin(plan(side.rank, [5], side.rank, [20])))
        assert blocks_of(side.memory, 20) == blocks_of(side.memory, 5) == blocks_of(pattern(1), 5)
        link.close()
    finally:
        side.close()


def test_the_whole_region_arrives_through_one_piece_and_through_one_for_each_block(own: Side, peer: Peer) -> None:
    link = own.copier.connect(peer.ranks[0])
    forward, backward = list(range(BLOCKS)), list(range(BLOCKS))[::-1]
    whole = plan(peer.ranks[0], forward, own.rank, forward)
    assert whole.descriptors == 1
    finish(link.begin(whole))
    assert np.array_equal(own.memory[:REGION_BYTES], pattern(1))
    mirrored = plan(peer.ranks[0], forward, own.rank, backward)
    assert mirrored.descriptors == BLOCKS * PLANES
    finish(link.begin(mirrored))
    assert all(blocks_of(own.memory, block) == blocks_of(pattern(1), BLOCKS - 1 - block) for block in forward)


def test_pieces_may_begin_and_end_at_any_byte(own: Side, peer: Peer) -> None:
    link = own.copier.connect(peer.ranks[0])
    finish(link.begin(piece(4095, 13, 8195)), bytes_max=1000)
    assert own.memory[13 : 13 + 8195].tobytes() == pattern(1)[4095 : 4095 + 8195].tobytes()
    assert not own.memory[:13].any()
    assert not own.memory[13 + 8195 :].any()


def test_a_plan_without_pieces_is_done_at_once(own: Side, peer: Peer) -> None:
    link = own.copier.connect(peer.ranks[0])
    assert link.begin(plan(peer.ranks[0], [], own.rank, [])).advance(1)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param((REGION_BYTES - 10, 0, 11), id="past the source's end"),
        pytest.param((0, REGION_BYTES - 10, 11), id="past the target's end"),
        pytest.param((-1, 0, 10), id="before the source"),
        pytest.param((0, -1, 10), id="before the target"),
        pytest.param((0, 0, 0), id="an empty piece"),
        pytest.param((0, 0, -5), id="a negative length"),
        pytest.param((2**63 - 8, 0, 16), id="a sum that overflows"),
        pytest.param((0, 2**63 - 8, 16), id="the same at the target"),
    ],
)
def test_a_piece_outside_either_region_is_refused(own: Side, peer: Peer, bad: tuple[int, int, int]) -> None:
    link = own.copier.connect(peer.ranks[0])
    with pytest.raises(CopierError):
        link.begin(piece(*bad))
    assert not own.memory.any()


def test_a_step_copies_no_more_than_it_may(kind: CopierKind, own: Side, peer: Peer) -> None:
    link = own.copier.connect(peer.ranks[0])
    transfer = link.begin(plan(peer.ranks[0], [1, 9, 2], own.rank, [3, 1, 2]))
    steps, bytes_max, done = 0, 3000, False
    while not done:
        done = transfer.advance(bytes_max)
        steps += 1
        # The pattern has no zeros, the target had nothing else.
        assert np.count_nonzero(own.memory) <= steps * bytes_max
    assert np.count_nonzero(own.memory) == 3 * BLOCK_BYTES * PLANES
    least = -(-3 * BLOCK_BYTES * PLANES // bytes_max)
    assert steps == least or (kind is CopierKind.NIXL and steps > least)  # UCX finishes some copies later


def test_a_step_that_may_copy_nothing_is_refused(own: Side, peer: Peer) -> None:
    transfer = own.copier.connect(peer.ranks[0]).begin(piece(0, 0, 100))
    with pytest.raises(ValueError, match="bytes_max"):
        transfer.advance(0)


def test_a_cancelled_transfer_writes_nothing_more(own: Side, peer: Peer) -> None:
    transfer = own.copier.connect(peer.ranks[0]).begin(piece(0, 0, REGION_BYTES))
    assert not transfer.advance(5000)
    transfer.cancel()
    transfer.cancel()
    before = own.memory.copy()
    with pytest.raises(CopierError, match="cancelled"):
        transfer.advance(5000)
    assert np.array_equal(own.memory, before)


def test_once_cancel_returns_nothing_writes_even_where_another_thread_copies(own: Side, peer: Peer) -> None:
    link = own.copier.connect(peer.ranks[0])
    transfer, started = link.begin(piece(0, 0, REGION_BYTES)), Event()

    def copy() -> None:
        try:
            while not transfer.advance(64):
                started.set()
        except CopierError:
            started.set()

    thread = Thread(target=copy)
    thread.start()
    started.wait(10)
    transfer.cancel()
    own.memory[:] = 0
    thread.join(10)
    assert not own.memory.any()


def test_a_killed_peer_is_an_error_at_every_step(own: Side, mortals: Mortals) -> None:
    peer = mortals()
    link = own.copier.connect(peer.ranks[0])
    transfer = link.begin(piece(0, 0, REGION_BYTES))
    assert not transfer.advance(5000)
    peer.kill()
    with pytest.raises(CopierError):
        finish(transfer)
    with pytest.raises(CopierError, match=r"cancelled|failed"):
        transfer.advance(1)
    with pytest.raises(CopierError):
        link.begin(piece(0, 0, 100))
    with pytest.raises(CopierError):
        own.copier.connect(peer.ranks[0])


def test_a_successor_at_the_same_place_is_not_taken_for_the_peer(own: Side, mortals: Mortals) -> None:
    peer = mortals()
    known = peer.ranks[0]
    link = own.copier.connect(known)
    peer.kill()
    successor = mortals()
    with pytest.raises(CopierError):
        own.copier.connect(known)
    with pytest.raises(CopierError):
        link.begin(piece(0, 0, 100))
    finish(own.copier.connect(successor.ranks[0]).begin(piece(0, 0, 100)))


def test_a_peer_that_offers_nothing_of_this_kind_is_refused(own: Side) -> None:
    with pytest.raises(CopierError, match="does not offer"):
        own.copier.connect(sides.LAYOUT)


def test_a_peer_with_a_strange_handle_is_an_error(kind: CopierKind, own: Side) -> None:
    for handle in (b"", b"\x01nonsense", msgspec.msgpack.encode([1, -1, b"no metadata"])):
        with pytest.raises(CopierError):
            own.copier.connect(msgspec.structs.replace(sides.LAYOUT, handles={kind: handle}))


def test_a_frozen_peer_never_leaves_cancel_waiting_nor_writes_after_it(own: Side, mortals: Mortals) -> None:
    peer = mortals()
    link = own.copier.connect(peer.ranks[0])
    finish(link.begin(piece(0, 0, 64)))
    peer.signal(signal.SIGSTOP)
    transfer = link.begin(piece(0, 0, REGION_BYTES))
    for _ in range(4):
        transfer.advance(1 << 16)
    transfer.cancel()
    after = own.memory.copy()
    peer.signal(signal.SIGCONT)
    time.sleep(0.1)
    assert np.array_equal(own.memory, after)
    link.close()
    finish(own.copier.connect(peer.ranks[0]).begin(piece(3, 1, 1000)))
    assert own.memory[1:1001].tobytes() == pattern(1)[3:1003].tobytes()


def test_a_process_that_was_read_from_ends_with_status_zero(own: Side, mortals: Mortals) -> None:
    peer = mortals()
    link = own.copier.connect(peer.ranks[0])
    finish(link.begin(piece(0, 0, 64)))
    link.close()
    assert peer.leave() == 0


@pytest.mark.skipif(bool(nixl_agent.why_not()), reason=nixl_agent.why_not())
def test_a_process_that_ends_while_its_agent_is_tended_ends_with_status_zero() -> None:
    code = """import time
from millrace.kvcopy import nixl_agent
nixl_agent.TEND_S = 0
agents = [nixl_agent.NixlAgent(name) for name in "ab"]
time.sleep(0.05)"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_many_peers_are_read_in_turns(own: Side, peer: Peer) -> None:
    links = [own.copier.connect(rank) for rank in peer.ranks]
    transfers = [
        link.begin(plan(rank, [1, 2, 3, 4], own.rank, [index * 4 + block for block in range(4)]))
        for index, (link, rank) in enumerate(zip(links, peer.ranks, strict=True))
    ]
    waiting = list(transfers)
    while waiting:
        waiting = [transfer for transfer in waiting if not transfer.advance(7000)]
    for index in range(len(peer.ranks)):
        theirs = pattern(index + 1)
        assert all(blocks_of(own.memory, index * 4 + block) == blocks_of(theirs, 1 + block) for block in range(4))


def test_what_the_owner_writes_later_is_what_is_read_later(kind: CopierKind, own: Side, tmp_path: Path) -> None:
    other = sides.make(kind, tmp_path, "other", seed=5)
    link = own.copier.connect(other.rank)
    finish(link.begin(piece(0, 0, 100)))
    other.memory[:100] = 200
    finish(link.begin(piece(0, 100, 100)))
    other.close()
    assert own.memory[:100].tobytes() == pattern(5)[:100].tobytes()
    assert set(own.memory[100:200]) == {200}


def test_a_closed_link_reads_nothing_more(own: Side, peer: Peer) -> None:
    link = own.copier.connect(peer.ranks[0])
    transfer = link.begin(piece(0, 0, REGION_BYTES))
    assert not transfer.advance(10)
    link.close()
    link.close()
    with pytest.raises(CopierError):
        finish(transfer)
    with pytest.raises(CopierError):
        link.begin(piece(0, 0, 10))


def test_an_owner_that_closes_its_copier_is_noticed(kind: CopierKind, own: Side, tmp_path: Path) -> None:
    other = sides.make(kind, tmp_path, "other", seed=5)
    link = own.copier.connect(other.rank)
    other.copier.close()
    other.copier.close()
    with pytest.raises(CopierError):
        finish(link.begin(piece(0, 0, 10)))


def test_connections_that_come_and_go_leave_nothing_behind(kind: CopierKind, tmp_path: Path) -> None:
    before = descriptors_open()
    threads = threading.active_count()
    one, other = sides.make(kind, tmp_path, "one"), sides.make(kind, tmp_path, "other", seed=3)
    settled = descriptors_open()
    for _ in range(20):
        link = one.copier.connect(other.rank)
        finish(link.begin(piece(0, 0, 100)))
        link.close()
    for _ in range(20):
        with pytest.raises(CopierError):
            one.copier.connect(sides.LAYOUT)
    one.copier.close()
    other.copier.close()
    assert descriptors_open() <= settled
    assert threading.active_count() <= threads
    del one, other, link
    assert descriptors_open() <= before + 2  # the regions' memfds are the engine's to close
