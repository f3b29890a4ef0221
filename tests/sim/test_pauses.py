"""Bounds of a client's wait where its sequence moves; the checker sees what exceeds them."""

import pytest
from millrace.sim.failure import SimulationFailed
from millrace.sim.kv_network import KvFaults
from millrace.sim.runtime_sim import MILLISECOND

from simulator.soak.run import SoakRun
from simulator.soak.seeds import shape_for
from simulator.soak.shape import MigrationShape
from tests.sim.soak_seeds import passed


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
