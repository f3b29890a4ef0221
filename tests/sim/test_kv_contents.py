"""Sensitivity of the simulation to a part of the migration that is wrong.

Each run breaks one thing in engines that are otherwise as they are; clients must then see wrong tokens. The
checker that looks into engines is told nothing here: what counts is what a client gets.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from millrace.actor.engine import KvDenied, SequenceStopped
from millrace.enginemodel.contents import KvContent, KvContents
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.leases import ModelledLeases
from millrace.sim.failure import SimulationFailed

from simulator.soak.cluster import SoakCluster
from simulator.soak.run import SoakRun
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


def in_the_wrong_order(engine: ModelledEngine) -> None:
    engine.moves.keep_contents(Unchained(engine.parameters.block_size))


def without_the_last_block(engine: ModelledEngine) -> None:
    engine.moves.keep_contents(Unwatched(engine.parameters.block_size))
    engine.moves.leases = OneTooEarly(engine.scheduler, engine._progress)
    engine.moves.leases.verify = False


@pytest.mark.parametrize("change", [in_the_wrong_order, without_the_last_block])
def test_a_wrong_block_gives_wrong_tokens(change: Callable[[ModelledEngine], None]) -> None:
    class Changed(SoakCluster):
        def change_engine(self, engine: ModelledEngine) -> None:
            change(engine)

    shape = shape_for("join_shortest_queue", MigrationShape(verify=False))
    with pytest.raises(SimulationFailed, match=WRONG_TOKENS):
        SoakRun(3, shape=shape, faults=False, rate=12.0, cluster=Changed).run()
