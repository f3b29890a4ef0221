"""Checker of brokers: one ask per sequence, no moving back and forth, no starvation, quiet in the end.

Bounds of asks and bids are among the brokers' own invariants, which the simulation checks after each message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from millrace.actor.effects import Effect, Publish
from millrace.contracts.broker import MoveReason
from millrace.contracts.catalog import Role
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import MILLISECOND, SECOND, Simulation

if TYPE_CHECKING:
    from simulator.soak.cluster import SoakCluster

#: Two moves of one sequence for memory, boundary or balance are at least so far apart (services/broker/intents.py).
COOLDOWN_NS = 2 * SECOND
FENCED = (MoveReason.MEMORY, MoveReason.BOUNDARY, MoveReason.BALANCE)

#: Moves of one sequence for balance, in its life.
BALANCE_MOVES_MAX = 3

#: Nobody is past its boundary for longer while there is room in the next stage.
STARVING_NS = 5 * SECOND

#: How often that is looked at.
LOOK_NS = 100 * MILLISECOND


class TradingWatch(Checker):
    """Looks on.

    Attributes:
        ended: Reason and outcome -> how many moves ended so.
    """

    def __init__(self, cluster: SoakCluster, *, disturbed: Callable[[], bool]) -> None:
        """Args: disturbed: whether harm may show; then brokers may have forgotten moves, and hosts be slow."""
        self.ended: Counter[str] = Counter()
        self._cluster = cluster
        self._disturbed = disturbed
        self._moved_ns: dict[str, int] = {}
        self._balances: Counter[str] = Counter()
        self._past_ns: dict[tuple[str, str], int] = {}
        self._looked_ns = 0

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        """Counts what ended, and compares each move with the sequence's last one."""
        for effect in effects:
            if isinstance(effect, Publish) and isinstance(effect.body, MigrationFinished):
                self._on_ended(effect.body, process.now_ns)

    def _on_ended(self, body: MigrationFinished, now_ns: int) -> None:
        how = f"{body.outcome} {body.refusal}" if body.refusal else str(body.outcome)
        self.ended[f"{body.reason} {how}"] += 1
        if body.outcome is not MigrationOutcome.MOVED:
            return
        if self._disturbed():
            self._forget()
        self._check_apart(body.sequence, body.reason, now_ns)
        self._moved_ns[body.sequence] = now_ns
        self._balances[body.sequence] += body.reason is MoveReason.BALANCE
        times = self._balances[body.sequence]
        assert times <= BALANCE_MOVES_MAX, f"{body.sequence} was moved {times} times for balance"

    def _check_apart(self, sequence: str, reason: MoveReason, now_ns: int) -> None:
        before_ns = self._moved_ns.get(sequence)
        if reason in FENCED and before_ns is not None:
            apart_ns = now_ns - before_ns
            assert apart_ns >= COOLDOWN_NS, f"{sequence} moved again after {apart_ns / 1e9:.2f} s for {reason}"

    def _forget(self) -> None:
        """Moves that brokers may have forgotten, too, and waits that a fault may have caused."""
        self._moved_ns.clear()
        self._balances.clear()
        self._past_ns.clear()

    def on_interval(self, simulation: Simulation) -> None:
        """At most one ask about a sequence of an epoch has not begun to move; none starves."""
        if simulation.now_ns - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = simulation.now_ns
        open_asks = Counter(about for about, state in self._asks() if state == "asking")
        twice = [about for about, count in open_asks.items() if count > 1]
        assert not twice, f"two open asks about {twice}"
        if self._disturbed():
            self._forget()
        else:
            self._look_for_starving(simulation.now_ns)

    def _instances(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what each running broker reports of its instances."""
        for actor in self._cluster.of_role(Role.BROKER):
            if actor.process is not None:
                yield from actor.actor.snapshot()["instances"].items()

    def _asks(self) -> Iterator[tuple[tuple[str, int], str]]:
        """Yield sequence and epoch at the source, where the source still has it, and the state of each ask."""
        held = {
            worker.name: worker.actor.snapshot()["sequences"] if worker.process is not None else {}
            for worker in self._cluster.workers
        }
        for name, own in self._instances():
            for sequence, _, _, state in own["out"].values():
                if sequence in held[name]:
                    yield (sequence, held[name][sequence][0]), state

    def _look_for_starving(self, now_ns: int) -> None:
        """Fails for sequences that stay far past their boundary while the stage above has room, and do not move."""
        past: dict[tuple[str, str], int] = {}
        moving: set[str] = set()
        for name, own in self._instances():
            moving |= {sequence for sequence, _, _, state in own["out"].values() if state == "moving"}
            for sequence in self._cluster.engines[name].engine.scheduler.running:
                far = own["boundary"] is not None and sequence.total >= 1.5 * own["boundary"]
                if far and any(self._has_room(other, len(sequence.blocks)) for other in own["above"]):
                    here = (sequence.sequence, name)  # a move begins the time anew, in the next stage
                    past[here] = self._past_ns.get(here, now_ns)
        self._past_ns = past
        waited = {here: now_ns - since_ns for here, since_ns in past.items() if here[0] not in moving}
        late = {here[0]: waited_ns for here, waited_ns in waited.items() if waited_ns > STARVING_NS}
        assert not late, f"past their boundary beside idle room: {late}"

    def _has_room(self, name: str, blocks: int) -> bool:
        scheduler = self._cluster.engines[name].engine.scheduler
        waiting = len(scheduler.waiting) + len(scheduler.arrived)
        free = len(scheduler.running) + waiting + 3 < scheduler.parameters.max_sequences
        return free and scheduler.pool.free >= 2 * blocks + 16

    def is_quiet(self) -> bool:
        """Whether nothing is asked for, no bid holds and no sequence waits to be offered anew."""
        brokers = self._cluster.of_role(Role.BROKER)
        if any(actor.process is None for actor in brokers):
            return False
        return not any(own[what] for _, own in self._instances() for what in ("out", "in", "resting"))
