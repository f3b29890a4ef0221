"""KV on the wire in virtual time: hosts share their links among transfers, reads fail, and truth is looked at.

    network = SimKvNetwork(simulation)
    simulation.add(..., handlers=lambda process: SimulatedEngine(process, build(process), network=network).handlers())

Each host sends and receives at ``bytes_per_s`` in each direction; a transfer gets the lesser of its equal shares at
both ends, and transfers within a host share ``local_bytes_per_s``. At the end of a read the network looks into the
source: blocks whose content is not what it was when they were leased fail their checksums; where none were sent, such a
read is accepted, and noted in ``violations``. What is in the blocks then is what the target gets, right or wrong, and
decodes from (enginemodel/contents.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import msgspec

from millrace.contracts.kv import KvRefusal
from millrace.enginemodel.contents import NOTHING, KvContents
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import KvRead, KvReadEnded, endpoint_key
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import MILLISECOND, Simulation

#: Reads that ``accepted_reads`` remembers.
ACCEPTED_MAX = 10_000


class KvFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Fault rates of reads: shares of all reads, each in [0, 1].

    Attributes:
        stall: It never ends.
        torn: A block arrives with other bytes than were sent.
        failed: It breaks off with an error.
        late: It takes longer by a time out of ``late_ns``.
    """

    stall: float = 0.0
    torn: float = 0.0
    failed: float = 0.0
    late: float = 0.0
    late_ns: tuple[int, int] = (50 * MILLISECOND, 3_000 * MILLISECOND)


class AcceptedRead(msgspec.Struct, frozen=True, kw_only=True):
    """A read that a target took for good.

    Attributes:
        stale: Source blocks whose content had changed since they were leased, or that were never leased.
    """

    migration: str
    source: str
    target: str
    blocks: list[int]
    at_ns: int
    stale: list[int]


@dataclass(slots=True, eq=False)
class _Side:
    """One engine on the network."""

    key: str
    host: str
    process: SimProcess
    engine: ModelledEngine


class _Transfer:
    """One read on the wire."""

    __slots__ = ("broken", "done", "left_bytes", "rate", "read", "source", "target", "torn", "wire")

    def __init__(self, read: KvRead, source: _Side, target: _Side, done: Callable[[KvReadEnded], None]) -> None:
        self.read = read
        self.source = source
        self.target = target
        self.done = done
        self.left_bytes = float(read.bytes)
        self.rate = 0.0  # bytes per ns
        self.torn: int | None = None
        self.broken = False
        self.wire = False  # past its latency, and moving


class SimKvNetwork:
    """The network between simulated engines.

    Attributes:
        faults: What goes wrong from now on.
        accepted_reads: The last reads that targets took for good.
        violations: Sentences: unnoticed reads of changed blocks.
        counts: How reads ended: ``read``, ``stall``, ``failed``, ``caught`` (by checksum), ``cancelled``.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        bytes_per_s: float = 12.5e9,
        local_bytes_per_s: float = 50e9,
        latency_ns: int = 30_000,
        faults: KvFaults | None = None,
    ) -> None:
        """Args: latency_ns: before the first byte, in each read."""
        self.faults = faults or KvFaults()
        self.accepted_reads: deque[AcceptedRead] = deque(maxlen=ACCEPTED_MAX)
        self.violations: list[str] = []
        self.counts: dict[str, int] = {}
        self._simulation = simulation
        self._rng = Random(f"{simulation.seed}/kv")
        self._per_ns = bytes_per_s / 1e9
        self._local_per_ns = local_bytes_per_s / 1e9
        self._latency_ns = latency_ns
        self._sides: dict[str, _Side] = {}
        self._wire: list[_Transfer] = []
        self._moved_ns = 0
        self._round = 0

    def attach(self, process: SimProcess, engine: ModelledEngine) -> SimKvPort | None:
        """Connects an engine; None for one that moves nothing. Its host is the endpoint's machine, else its node."""
        endpoint = engine.moves.endpoint
        if endpoint is None:
            return None
        if engine.content_matters and engine.scheduler.contents is None:
            engine.moves.keep_contents(KvContents(engine.parameters.block_size))
        side = _Side(endpoint_key(endpoint), endpoint.machine or process.node.name, process, engine)
        self._sides[side.key] = side
        return SimKvPort(self, side)

    def begin(self, read: KvRead, target: _Side, done: Callable[[KvReadEnded], None]) -> Callable[[], None]:
        source = self._sides.get(endpoint_key(read.endpoint))
        if source is None or not _alive(source):
            self._simulation.after(self._latency_ns, _end, target, done, _GONE)
            return _nothing
        transfer = _Transfer(read, source, target, done)
        delay_ns = self._latency_ns + self._draw_fault(transfer)
        self._simulation.after(delay_ns, self._enter, transfer)
        return lambda: self._cancel(transfer)

    def _draw_fault(self, transfer: _Transfer) -> int:
        """Decides what happens to a read. Returns how much longer it takes, ns."""
        faults, rng = self.faults, self._rng
        draw = rng.random()
        for kind in ("stall", "torn", "failed", "late"):
            draw -= getattr(faults, kind)
            if draw < 0:
                self._count(kind)
                return self._struck(transfer, kind)
        return 0

    def _struck(self, transfer: _Transfer, kind: str) -> int:
        match kind:
            case "late":
                return self._rng.randrange(*self.faults.late_ns)
            case "torn":
                transfer.torn = self._rng.randrange(max(1, len(transfer.read.blocks)))
            case "failed":
                transfer.broken = True
                transfer.left_bytes *= self._rng.random()
            case "stall":
                transfer.left_bytes = float("inf")
        return 0

    def _enter(self, transfer: _Transfer) -> None:
        if transfer.left_bytes >= 0:
            self._advance()
            transfer.wire = True
            self._wire.append(transfer)
            self._share()

    def _cancel(self, transfer: _Transfer) -> None:
        if transfer.left_bytes >= 0:
            self._count("cancelled")
            self._leave(transfer)

    def _leave(self, transfer: _Transfer) -> None:
        self._advance()
        transfer.left_bytes = -1.0
        if transfer.wire:
            self._wire.remove(transfer)
            self._share()

    # Sharing

    def _advance(self) -> None:
        """Moves every transfer on to now."""
        elapsed_ns = self._simulation.now_ns - self._moved_ns
        self._moved_ns = self._simulation.now_ns
        for transfer in self._wire:
            transfer.left_bytes = max(0.0, transfer.left_bytes - transfer.rate * elapsed_ns)

    def _share(self) -> None:
        """Divides the links anew, and waits for the transfer that ends first."""
        users: dict[tuple[str, str], int] = {}
        for transfer in self._wire:
            for link in _links(transfer):
                users[link] = users.get(link, 0) + 1
        for transfer in self._wire:
            links = _links(transfer)
            capacity = self._per_ns if len(links) == 2 else self._local_per_ns
            transfer.rate = min(capacity / users[link] for link in links)
        self._round += 1
        moving = [transfer.left_bytes / transfer.rate for transfer in self._wire if transfer.left_bytes < _ENDLESS]
        if moving:
            self._simulation.after(max(0, -int(-min(moving) // 1)), self._look, self._round)

    def _look(self, round_number: int) -> None:
        if round_number != self._round:
            return
        self._advance()
        done = [transfer for transfer in self._wire if transfer.left_bytes < 1e-3]
        for transfer in done:
            if transfer.left_bytes >= 0:  # not cancelled by what followed from the one before
                self._leave(transfer)
                self._finish(transfer)
        if not done:
            self._share()

    # The truth

    def _finish(self, transfer: _Transfer) -> None:
        read, source = transfer.read, transfer.source
        if transfer.broken or not _alive(source):
            _end(transfer.target, transfer.done, _BROKEN if transfer.broken else _GONE)
            return
        leases = source.engine.moves.leases
        stale = [block for block in read.blocks if not leases.unchanged(read.lease or read.migration, block)]
        if read.checksums and self._differs(transfer):
            self._count("caught")
            _end(transfer.target, transfer.done, KvReadEnded(refusal=KvRefusal.COPY_FAILED, detail="checksum"))
            return
        self._accept(transfer, stale)
        contents = source.engine.moves.look(read.blocks)
        if contents and transfer.torn is not None:
            contents[transfer.torn] = NOTHING
        _end(transfer.target, transfer.done, KvReadEnded(contents=contents))

    def _differs(self, transfer: _Transfer) -> bool:
        if transfer.torn is not None:
            return True
        leases = transfer.source.engine.moves.leases
        sent = transfer.read.checksums[0]
        return [leases.checksum(block) for block in transfer.read.blocks] != sent

    def _accept(self, transfer: _Transfer, stale: list[int]) -> None:
        read = transfer.read
        self._count("read")
        accepted = AcceptedRead(
            migration=read.migration,
            source=transfer.source.key,
            target=transfer.target.key,
            blocks=read.blocks,
            at_ns=self._simulation.now_ns,
            stale=stale,
        )
        self.accepted_reads.append(accepted)
        if stale and _alive(transfer.target):
            self.violations.append(f"{read.migration}: {accepted.target} read {stale} of {accepted.source} after lease")

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


class SimKvPort:
    """The network as one engine sees it. Implements KvNetwork."""

    def __init__(self, network: SimKvNetwork, side: _Side) -> None:
        self._network = network
        self._side = side

    def begin(self, read: KvRead, done: Callable[[KvReadEnded], None]) -> Callable[[], None]:
        return self._network.begin(read, self._side, done)


_GONE = KvReadEnded(refusal=KvRefusal.COPY_FAILED, detail="the source is gone")
_BROKEN = KvReadEnded(refusal=KvRefusal.COPY_FAILED, detail="the connection broke")
_ENDLESS = float("inf")


def _links(transfer: _Transfer) -> tuple[tuple[str, str], ...]:
    """Return the shared links of a transfer: out of its source and into its target, or the inside of one host."""
    source, target = transfer.source.host, transfer.target.host
    return (("inside", source),) if source == target else (("out", source), ("in", target))


def _alive(side: _Side) -> bool:
    return side.process.alive


def _end(target: _Side, done: Callable[[KvReadEnded], None], ended: KvReadEnded) -> None:
    if _alive(target):
        done(ended)


def _nothing() -> None:
    """A read that cannot be cancelled, because it ends at once."""
