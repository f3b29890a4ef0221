"""Faults that the simulation must see: wrong KV blocks as wrong tokens, and reads that take too long as pauses."""

from collections import deque
from collections.abc import Sequence

import pytest
from millrace.enginemodel.contents import KvContent, KvContents
from millrace.enginemodel.engine import ModelledEngine
from millrace.sim.failure import SimulationFailed
from millrace.sim.kv_network import KvFaults
from millrace.sim.runtime_sim import MILLISECOND

from simulator.soak.cluster import SoakCluster
from simulator.soak.run import SoakRun
from simulator.soak.seeds import shape_for
from simulator.soak.shape import MigrationShape
from tests.sim.soak_seeds import passed

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


def scenario() -> SoakRun:
    shape = shape_for("join_shortest_queue", MigrationShape(bytes_per_s=2e9))  # a block takes a millisecond
    return SoakRun(3, shape=shape, faults=False, rate=12.0)


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
