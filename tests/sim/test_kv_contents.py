"""Sensitivity of the simulation to a part of the migration that is wrong.

Each test breaks one thing in engines or ingress that are otherwise as they are; clients must then see wrong tokens. The
checker that looks into engines is told nothing here: what counts is what a client gets.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect
from millrace.actor.engine import KvDenied, SequenceStopped
from millrace.contracts.catalog import Role
from millrace.contracts.message import Message
from millrace.contracts.migration import SequenceMoved
from millrace.enginemodel.contents import KvContent, KvContents
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.leases import ModelledLeases
from millrace.sim.failure import SimulationFailed
from millrace.sim.kv_network import KvFaults
from millrace.sim.runtime_sim import MILLISECOND

from services.ingress.actor import IngressActor
from simulator.soak.cluster import SoakCluster
from simulator.soak.run import SoakReport, SoakRun
from simulator.soak.seeds import shape_for
from simulator.soak.shape import MigrationShape

#: What clients say of wrong tokens (simulator/soak/clients.py).
WRONG_TOKENS = "is no start of|follows from nothing|instead of"


class Unwatched(KvContents):
    """Tells no checker that a sequence found something else than its KV."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.poisoned = deque(maxlen=0)  # type: ignore[assignment]


class Unchained(Unwatched):
    """Reads bring the right blocks in the wrong order."""

    def put(self, blocks: Sequence[int], contents: Sequence[KvContent]) -> None:
        super().put(blocks, contents[::-1])


class OneTooEarly(ModelledLeases):
    """A freeze tells the blocks from one before the first one on, and so leaves out the last, half-full one."""

    def _stopped(self, lease: Any, now_ns: int) -> SequenceStopped | KvDenied | None:
        answer = super()._stopped(lease, now_ns)
        if isinstance(answer, SequenceStopped) and answer.from_block and answer.blocks:
            before = lease.sequence.blocks[answer.from_block - 1]
            return msgspec.structs.replace(answer, blocks=[[before], *answer.blocks[:-1]])
        return answer


class GoesOn(ModelledLeases):
    """A source that says that it stands still, and does not."""

    def _stopped(self, lease: Any, now_ns: int) -> SequenceStopped | KvDenied | None:
        answer = super()._stopped(lease, now_ns)
        if isinstance(answer, SequenceStopped):
            self._scheduler.thaw(lease.sequence)
        return answer


class Gullible(IngressActor):
    """Lets a target have a sequence though its source has gone on since."""

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        body = message.body
        sequence = self.state.sequences.get(body.sequence) if isinstance(body, SequenceMoved) else None
        if sequence is not None:
            believed = msgspec.structs.replace(body, first_index=max(body.first_index, len(sequence.log)))
            message = msgspec.structs.replace(message, body=believed)
        return super().handle(message, now_ns)


def keeps(kind: type[KvContents]) -> Callable[[ModelledEngine], None]:
    return lambda engine: engine.moves.keep_contents(kind(engine.parameters.block_size))


def leases(kind: type[ModelledLeases]) -> Callable[[ModelledEngine], None]:
    def change(engine: ModelledEngine) -> None:
        keeps(Unwatched)(engine)
        engine.moves.leases = kind(engine.scheduler, engine._progress)
        engine.moves.leases.verify = False

    return change


def cluster(change: Callable[[ModelledEngine], None]) -> type[SoakCluster]:
    class Changed(SoakCluster):
        def change_engine(self, engine: ModelledEngine) -> None:
            change(engine)

    return Changed


def run(kind: type[SoakCluster], *, reads: KvFaults | None = None, latency_ns: int = 30_000) -> SoakReport:
    shape = shape_for("join_shortest_queue", MigrationShape(verify=False, latency_ns=latency_ns))
    scenario = SoakRun(3, shape=shape, faults=False, rate=12.0, cluster=kind)
    scenario.cluster.network.faults = reads or KvFaults()
    return scenario.run()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(keeps(Unchained), id="the target writes blocks in the wrong order"),
        pytest.param(leases(OneTooEarly), id="the freeze leaves out the last block"),
    ],
)
def test_a_wrong_block_gives_wrong_tokens(change: Callable[[ModelledEngine], None]) -> None:
    with pytest.raises(SimulationFailed, match=WRONG_TOKENS):
        run(cluster(change))


#: The last blocks take so long that a source that goes on decodes a few tokens meanwhile.
LATENCY_NS = 30 * MILLISECOND


def test_ingress_keeps_to_one_history_where_a_frozen_source_goes_on() -> None:
    outcomes = run(cluster(leases(GoesOn)), latency_ns=LATENCY_NS).outcomes
    assert outcomes["completed"] > 50


def test_tokens_of_another_history_are_seen_where_ingress_mistakes_the_owner() -> None:
    class Mistaken(cluster(leases(GoesOn))):  # type: ignore[misc]
        def build_actor(self, role: Role, config: Any, deps: ActorDeps) -> Actor:
            actor = super().build_actor(role, config, deps)
            if role is Role.INGRESS:
                actor.__class__ = Gullible
            return actor

    with pytest.raises(SimulationFailed, match="follows from nothing"):
        run(Mistaken, latency_ns=LATENCY_NS)
