"""Bounds of a client's wait where its sequence moves; the checker sees what exceeds them."""

from typing import Any

import pytest
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, Reply
from millrace.contracts.catalog import Role
from millrace.contracts.leases import FreezeSequence, SequenceFrozen
from millrace.contracts.local import TimerFired
from millrace.contracts.message import Message
from millrace.sim.checkers import Checker
from millrace.sim.checkers.pauses import PauseBounds
from millrace.sim.failure import SimulationFailed
from millrace.sim.kv_network import KvFaults
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import MILLISECOND

from services.worker.actor import WorkerActor
from simulator.soak.cluster import SoakCluster
from simulator.soak.run import SoakRun
from simulator.soak.seeds import shape_for
from simulator.soak.shape import MigrationShape
from tests.sim.soak_seeds import passed

#: 2 GB/s: a block takes a millisecond.
SHAPE = MigrationShape(bytes_per_s=2e9)
BOUNDS = PauseBounds(
    message=2, step=10, recompute=300, latency=1, bytes_per_s=1e9, block_bytes=50, freeze_max=2_000, harm=9_000
)


def scenario(kind: type[SoakCluster] = SoakCluster) -> SoakRun:
    return SoakRun(3, shape=shape_for("join_shortest_queue", SHAPE), faults=False, rate=12.0, cluster=kind)


@pytest.mark.parametrize(
    ("blocks", "pause"),
    [
        (0, 12 + 20 + 1),
        (1, 12 + 20 + 1 + 50),
        (2, 12 + 20 + 1 + 100),
        (3, 12 + 20 + 250 + 300),  # it may take more than half of the freeze: then it may be given up
        (99, 12 + 20 + 250 + 300),
    ],
)
def test_a_pause_is_messages_a_step_at_each_end_and_the_last_blocks(blocks: int, pause: int) -> None:
    assert BOUNDS.quiet(blocks=blocks, freeze=250) == pause


def test_undisturbed_moves_show_their_clients_one_slow_token() -> None:
    undisturbed = scenario()
    undisturbed.run()
    pauses = undisturbed.pauses
    assert pauses.quiet > 15
    assert 0 < pauses.longest_ns < 60 * MILLISECOND


@pytest.mark.parametrize(
    "seed",
    [pytest.param(56, id="replicas share the wire"), pytest.param(252, id="its KV came too late for a full batch")],
)
def test_longer_pauses_with_a_cause_of_their_own_are_no_error(seed: int) -> None:
    assert passed(seed, "join_shortest_queue", migrations=True).outcomes


def test_reads_that_take_longer_than_the_network_does_are_seen() -> None:
    slow = scenario()
    slow.cluster.network.faults = KvFaults(late=1.0, late_ns=(80 * MILLISECOND, 90 * MILLISECOND))
    with pytest.raises(SimulationFailed, match=r"paused for .* at most .* ms, in"):
        slow.run()


class Forgetting(Checker):
    """Ends whoever drives a migration as soon as its source stands still."""

    def __init__(self, cluster: SoakCluster) -> None:
        self._cluster = cluster
        self.ended = 0

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        if any(isinstance(effect, Reply) and isinstance(effect.body, SequenceFrozen) for effect in effects):
            self.ended += 1
            for migrator in self._cluster.migrators:
                self._cluster.simulation.after(0, self._cluster.simulation.faults.kill, migrator)


class Sleeping(WorkerActor):
    """Does not look at its clock: a sequence that stands still does so until somebody says otherwise."""

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        body: Any = message.body
        if isinstance(body, TimerFired) and body.name in self.frozen_timers:
            return []
        effects = super().handle(message, now_ns)
        if isinstance(body, FreezeSequence):
            self.frozen_timers.update(effect.name for effect in effects if hasattr(effect, "at_ns"))
        return effects


def forgotten(kind: type[SoakCluster] = SoakCluster) -> tuple[SoakRun, Forgetting]:
    made = scenario(kind)
    checker = Forgetting(made.cluster)
    made.cluster.simulation.check_with(checker)
    made.pauses.disturbed = lambda: True
    return made, checker


def test_a_source_that_nobody_drives_any_more_goes_on_by_itself() -> None:
    made, checker = forgotten()
    made.run()
    assert checker.ended > 3


def test_a_source_that_does_not_look_at_its_clock_is_seen() -> None:
    class Cluster(SoakCluster):
        def build_actor(self, role: Role, config: Any, deps: ActorDeps) -> Actor:
            actor = super().build_actor(role, config, deps)
            if role is Role.WORKER:
                actor.__class__ = Sleeping
                actor.frozen_timers = set()  # type: ignore[attr-defined]
            return actor

    made, _ = forgotten(Cluster)
    with pytest.raises(SimulationFailed, match="stands still in w"):
        made.run()
