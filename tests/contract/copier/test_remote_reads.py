"""NIXL against a source in a process of its own: every byte, every failure, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from millrace.contracts.kv import CopierKind, KvRank
from millrace.kvcopy import nixl_agent
from millrace.kvcopy.copier_port import Copier, CopierError, CopyPlan, Link, Transfer

from tests.contract.copier.reading_peer import content, copier_of, rank_of

REGION_BYTES = 8 << 20
SEED = 7
#: Only a failing test waits so long, seconds.
PATIENCE_S = 30.0


class Peer:
    """A source in another process."""

    def __init__(self, kind: CopierKind) -> None:
        words = [sys.executable, "-m", "tests.contract.copier.reading_peer", kind, str(REGION_BYTES), str(SEED)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer did not start"
        self.rank = msgspec.msgpack.decode(bytes.fromhex(line), type=KvRank)

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(word, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline().strip() == "done"

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def leave(self) -> int:
        """Lets it end by itself; returns its status."""
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode


@pytest.fixture(params=[CopierKind.NIXL], ids=str, scope="module")
def kind(request: pytest.FixtureRequest) -> CopierKind:
    reason = nixl_agent.why_not()
    if reason:
        pytest.skip(reason)
    return CopierKind(request.param)


@pytest.fixture(scope="module")
def shared_peer(kind: CopierKind) -> Iterator[Peer]:
    """For tests that only read."""
    peer = Peer(kind)
    yield peer
    peer.kill()


@pytest.fixture
def own_peer(kind: CopierKind) -> Iterator[Peer]:
    """For tests that harm it."""
    peer = Peer(kind)
    yield peer
    peer.kill()


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(REGION_BYTES, dtype=np.uint8)


@pytest.fixture
def copier(kind: CopierKind, memory: np.ndarray) -> Iterator[Copier]:
    made = copier_of(kind, memory)
    yield made
    made.close()


def plan_of(*pieces: tuple[int, int, int]) -> CopyPlan:
    rows = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    return CopyPlan(source=rows[:, 0].copy(), target=rows[:, 1].copy(), lengths=rows[:, 2].copy())


def scattered(pieces: int, length: int) -> CopyPlan:
    """Pieces that touch on neither side, in another order at the target."""
    offsets = np.arange(pieces, dtype=np.int64) * (2 * length)
    return CopyPlan(source=offsets, target=offsets[::-1].copy() + 1, lengths=np.full(pieces, length, dtype=np.int64))


def finish(transfer: Transfer, bytes_max: int = 1 << 20) -> None:
    until = time.monotonic() + PATIENCE_S
    while not transfer.advance(bytes_max):
        assert time.monotonic() < until, "the transfer does not end"
        time.sleep(0)


def expected(plan: CopyPlan, seed: int = SEED) -> np.ndarray:
    """The target's region after the plan, byte by byte."""
    there, here = content(REGION_BYTES, seed), np.zeros(REGION_BYTES, dtype=np.uint8)
    for source, target, length in zip(plan.source, plan.target, plan.lengths, strict=True):
        here[target : target + length] = there[source : source + length]
    return here


@pytest.mark.parametrize("bytes_max", [1 << 30, 1 << 20, 4097])
@pytest.mark.parametrize(
    "plan",
    [scattered(700, 96), scattered(3, 50_001), plan_of((1, 5, 3 << 20), (0, 0, 1))],
    ids=["700 small", "3 middling", "one large"],
)
def test_every_byte_lands_where_the_plan_says_and_no_other_changes(
    shared_peer: Peer, copier: Copier, memory: np.ndarray, plan: CopyPlan, bytes_max: int
) -> None:
    link = copier.connect(shared_peer.rank)
    finish(link.begin(plan), bytes_max)
    assert np.array_equal(memory, expected(plan))


def test_an_empty_plan_is_done_and_stays_done(shared_peer: Peer, copier: Copier) -> None:
    transfer = copier.connect(shared_peer.rank).begin(plan_of())
    finish(transfer)
    assert transfer.advance(1)
    transfer.cancel()


def test_transfers_of_one_link_go_on_in_turn(shared_peer: Peer, copier: Copier, memory: np.ndarray) -> None:
    link = copier.connect(shared_peer.rank)
    plans = [plan_of((0, 0, 1 << 20)), plan_of((2 << 20, 1 << 20, 1 << 20)), scattered(20, 1000)]
    plans[2] = CopyPlan(source=plans[2].source, target=plans[2].target + (3 << 20), lengths=plans[2].lengths)
    transfers = [link.begin(plan) for plan in plans]
    until = time.monotonic() + PATIENCE_S
    while transfers:
        assert time.monotonic() < until
        transfers = [transfer for transfer in transfers if not transfer.advance(100_000)]
    whole = CopyPlan(
        **{name: np.concatenate([getattr(plan, name) for plan in plans]) for name in CopyPlan.__struct_fields__}
    )
    assert np.array_equal(memory, expected(whole))


@pytest.mark.parametrize(
    "piece", [(-1, 0, 8), (0, -1, 8), (REGION_BYTES - 7, 0, 8), (0, REGION_BYTES - 7, 8), (0, 0, 0), (2**62, 0, 2**62)]
)
def test_a_piece_outside_either_region_is_refused_and_the_link_lives(
    shared_peer: Peer, copier: Copier, memory: np.ndarray, piece: tuple[int, int, int]
) -> None:
    link = copier.connect(shared_peer.rank)
    with pytest.raises(CopierError):
        link.begin(plan_of(piece))
    good = plan_of((8, 16, 24))
    finish(link.begin(good))
    assert np.array_equal(memory, expected(good))


def test_after_cancel_nothing_writes_and_the_transfer_is_over(
    shared_peer: Peer, copier: Copier, memory: np.ndarray
) -> None:
    link = copier.connect(shared_peer.rank)
    finish(link.begin(plan_of((0, 0, 1))))
    transfer = link.begin(plan_of((0, 0, REGION_BYTES)))
    transfer.advance(200_000)
    transfer.cancel()
    after = memory.copy()
    time.sleep(0.05)
    assert np.array_equal(memory, after)
    with pytest.raises(CopierError):
        transfer.advance(1 << 20)
    transfer.cancel()


def test_a_peer_without_a_handle_or_with_a_strange_one_is_an_error(kind: CopierKind, copier: Copier) -> None:
    bare = rank_of(REGION_BYTES)
    for handles in ({}, {kind: b""}, {kind: b"\x01nonsense"}, {kind: msgspec.msgpack.encode([1, -1, b"no metadata"])}):
        with pytest.raises(CopierError):
            copier.connect(msgspec.structs.replace(bare, handles=handles))


def test_a_dead_peer_is_an_error_and_another_one_can_still_be_read(
    kind: CopierKind, own_peer: Peer, copier: Copier, memory: np.ndarray
) -> None:
    link = copier.connect(own_peer.rank)
    finish(link.begin(plan_of((0, 0, 64))))
    own_peer.kill()
    with pytest.raises(CopierError):
        finish(link.begin(plan_of((0, 0, REGION_BYTES))))
    with pytest.raises(CopierError):
        finish(link.begin(plan_of((0, 0, 64))))
    link.close()
    with pytest.raises(CopierError):
        finish(copier.connect(own_peer.rank).begin(plan_of((0, 0, 64))))
    other = Peer(kind)
    try:
        plan = plan_of((100, 0, REGION_BYTES - 100))
        finish(copier.connect(other.rank).begin(plan))
        assert np.array_equal(memory[:-100], content(REGION_BYTES, SEED)[100:])
    finally:
        other.kill()


def test_a_peer_that_dies_in_the_middle_is_an_error_at_once(own_peer: Peer, copier: Copier) -> None:
    transfer = copier.connect(own_peer.rank).begin(plan_of((0, 0, REGION_BYTES)))
    transfer.advance(4096)
    own_peer.kill()
    began = time.monotonic()
    with pytest.raises(CopierError):
        finish(transfer, 4096)
    assert time.monotonic() - began < PATIENCE_S


def test_a_frozen_peer_never_leaves_cancel_waiting_nor_writes_after_it(
    own_peer: Peer, copier: Copier, memory: np.ndarray
) -> None:
    link: Any = copier.connect(own_peer.rank)
    finish(link.begin(plan_of((0, 0, 64))))
    own_peer.signal(signal.SIGSTOP)
    transfer = link.begin(plan_of((0, 0, REGION_BYTES)))
    for _ in range(4):
        transfer.advance(1 << 20)
    transfer.cancel()
    after = memory.copy()
    own_peer.signal(signal.SIGCONT)
    time.sleep(0.1)
    assert np.array_equal(memory, after)
    link.close()
    again = copier.connect(own_peer.rank)
    finish(again.begin(plan_of((3, 1, 1000))))
    assert np.array_equal(memory[1:1001], content(REGION_BYTES, SEED)[3:1003])


def test_what_the_source_writes_is_read_by_the_next_transfer(
    own_peer: Peer, copier: Copier, memory: np.ndarray
) -> None:
    link = copier.connect(own_peer.rank)
    plan = plan_of((10, 20, 100_000))
    finish(link.begin(plan))
    own_peer.tell("change")
    finish(link.begin(plan))
    assert np.array_equal(memory, expected(plan, SEED + 1))


def test_links_and_copiers_close_twice_and_leave_no_descriptor_or_thread(kind: CopierKind, shared_peer: Peer) -> None:
    def once() -> None:
        memory = np.zeros(REGION_BYTES, dtype=np.uint8)
        copier = copier_of(kind, memory)
        link: Link = copier.connect(shared_peer.rank)
        finish(link.begin(plan_of((0, 0, 4096))))
        for _ in range(2):
            link.close()
        with pytest.raises(CopierError):
            link.begin(plan_of((0, 0, 4096)))
        for _ in range(2):
            copier.close()
        with pytest.raises(CopierError):
            copier.connect(shared_peer.rank)

    once()  # libraries open what they keep
    before = (_descriptors(), _threads())
    for _ in range(3):
        once()
    assert (_descriptors(), _threads()) == before


def test_a_copier_closed_with_a_transfer_under_way_ends_it(kind: CopierKind, shared_peer: Peer) -> None:
    copier = copier_of(kind, np.zeros(REGION_BYTES, dtype=np.uint8))
    transfer = copier.connect(shared_peer.rank).begin(plan_of((0, 0, REGION_BYTES)))
    transfer.advance(4096)
    copier.close()
    with pytest.raises(CopierError):
        transfer.advance(4096)


def test_a_source_that_closes_its_copier_is_an_error_for_its_readers(own_peer: Peer, copier: Copier) -> None:
    link = copier.connect(own_peer.rank)
    finish(link.begin(plan_of((0, 0, 64))))
    own_peer.tell("close")
    with pytest.raises(CopierError):
        finish(copier.connect(own_peer.rank).begin(plan_of((0, 0, 64))))


def test_a_process_that_was_read_from_ends_with_status_zero(own_peer: Peer, copier: Copier) -> None:
    link = copier.connect(own_peer.rank)
    finish(link.begin(plan_of((0, 0, 64))))
    link.close()
    assert own_peer.leave() == 0


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
