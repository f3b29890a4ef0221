"""Sensitivity of the simulation to reads that bring wrong blocks: clients must see wrong tokens."""

from collections import deque
from collections.abc import Sequence

import pytest
from millrace.enginemodel.contents import KvContent, KvContents
from millrace.enginemodel.engine import ModelledEngine
from millrace.sim.failure import SimulationFailed

from simulator.soak.cluster import SoakCluster
from simulator.soak.run import SoakRun
from simulator.soak.seeds import shape_for
from simulator.soak.shape import MigrationShape

#: What clients say of wrong tokens (simulator/soak/clients.py).
WRONG_TOKENS = "is no start of|follows from nothing|instead of"


class Unchained(KvContents):
    """Reads bring the right blocks in the wrong order, and no checker is told."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.poisoned = deque(maxlen=0)  # type: ignore[assignment]

    def put(self, blocks: Sequence[int], contents: Sequence[KvContent]) -> None:
        super().put(blocks, contents[::-1])


def test_a_wrong_block_gives_wrong_tokens() -> None:
    class Changed(SoakCluster):
        def change_engine(self, engine: ModelledEngine) -> None:
            engine.moves.keep_contents(Unchained(engine.parameters.block_size))

    shape = shape_for("join_shortest_queue", MigrationShape(verify=False))
    with pytest.raises(SimulationFailed, match=WRONG_TOKENS):
        SoakRun(3, shape=shape, faults=False, rate=12.0, cluster=Changed).run()
