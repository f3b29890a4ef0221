"""Checker of trading: one deal per sequence, no moving back and forth, no starvation, quiet in the end.

Bounds of slots and queues are among the brokers' own invariants, which the simulation checks after each message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from millrace.actor.effects import Effect, Publish
from millrace.contracts.broker import DealEnded, MoveReason, OfferDeal
from millrace.contracts.catalog import Role
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrationOutcome
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import MILLISECOND, SECOND, Simulation

if TYPE_CHECKING:
    from simulator.soak.cluster import SoakCluster

#: Two moves of one sequence for memory, boundary or balance are at least so far apart (services/broker/fences.py).
COOLDOWN_NS = 2 * SECOND

#: Nobody is past its boundary for longer while there is room in the next stage.
STARVING_NS = 5 * SECOND

#: How often that is looked at.
LOOK_NS = 100 * MILLISECOND

#: Of a sequence: it has a deal that has not begun to move.
BEFORE_MOVING = ("asking", "offering", "queued", "granted")


class TradingWatch(Checker):
    """Looks on.

    Attributes:
        ended: Reason and outcome -> how many deals ended so.
    """

    def __init__(self, cluster: SoakCluster, *, disturbed: Callable[[], bool]) -> None:
        """Args: disturbed: whether faults were done; then brokers may have forgotten moves, and hosts be slow."""
        self.ended: Counter[str] = Counter()
        self._cluster = cluster
        self._disturbed = disturbed
        self._reasons: dict[str, MoveReason] = {}
        self._moved_ns: dict[str, int] = {}
        self._past_ns: dict[str, int] = {}
        self._looked_ns = 0

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        """Counts what ended, and compares each move with the sequence's last one."""
        for effect in effects:
            body = getattr(effect, "body", None)
            if isinstance(body, OfferDeal):
                self._reasons[body.deal] = body.reason
            elif isinstance(effect, Publish) and isinstance(body, DealEnded):
                self._on_ended(body, process.now_ns)

    def _on_ended(self, body: DealEnded, now_ns: int) -> None:
        reason = self._reasons[body.deal]
        how = f"{body.outcome} {body.refusal}" if body.refusal else str(body.outcome)
        self.ended[f"{reason} {how}"] += 1
        assert self._disturbed() or body.moves <= 3, f"{body.sequence} moved {body.moves} times for balance"
        if body.outcome is not MigrationOutcome.MOVED:
            return
        before_ns = self._moved_ns.get(body.sequence)
        fenced = reason in (MoveReason.MEMORY, MoveReason.BOUNDARY, MoveReason.BALANCE) and not self._disturbed()
        if fenced and before_ns is not None:
            apart_ns = now_ns - before_ns
            assert apart_ns >= COOLDOWN_NS, f"{body.sequence} moved again after {apart_ns / 1e9:.2f} s for {reason}"
        self._moved_ns[body.sequence] = now_ns

    def on_interval(self, simulation: Simulation) -> None:
        """At most one deal about a sequence has not begun to move; nobody starves."""
        if simulation.now_ns - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = simulation.now_ns
        if self._disturbed():
            return
        open_deals = Counter(sequence for sequence, state in self._deals() if state in BEFORE_MOVING)
        twice = [sequence for sequence, count in open_deals.items() if count > 1]
        assert not twice, f"two open deals about {twice}"
        self._look_for_starving(simulation.now_ns)

    def _instances(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what each running broker reports of its instances."""
        for actor in self._cluster.of_role(Role.BROKER):
            if actor.process is not None:
                yield from actor.actor.snapshot()["instances"].items()

    def _deals(self) -> Iterator[tuple[str, str]]:
        for _, own in self._instances():
            yield from ((sequence, state) for sequence, _, _, state in own["out"].values())

    def _look_for_starving(self, now_ns: int) -> None:
        """Whoever is far past its boundary, with room above: not for long."""
        past: dict[str, int] = {}
        for name, own in self._instances():
            for sequence in self._cluster.engines[name].engine.scheduler.running:
                far = own["boundary"] is not None and sequence.total >= 1.5 * own["boundary"]
                if far and any(self._has_room(other, len(sequence.blocks)) for other in own["above"]):
                    past[sequence.sequence] = self._past_ns.get(sequence.sequence, now_ns)
        self._past_ns = past
        late = {name: now_ns - since_ns for name, since_ns in past.items() if now_ns - since_ns > STARVING_NS}
        assert not late, f"past their boundary beside idle room: {late}"

    def _has_room(self, name: str, blocks: int) -> bool:
        scheduler = self._cluster.engines[name].engine.scheduler
        waiting = len(scheduler.waiting) + len(scheduler.arrived)
        free = len(scheduler.running) + waiting + 3 < scheduler.parameters.max_sequences
        return free and scheduler.pool.free >= 2 * blocks + 16

    def is_quiet(self) -> bool:
        """Whether no deal is open."""
        brokers = self._cluster.of_role(Role.BROKER)
        if any(actor.process is None for actor in brokers):
            return False
        return not any(own["out"] or own["in"] for _, own in self._instances())
