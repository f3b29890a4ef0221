"""Cascades under faults: thresholds swapped all the time, an erratic judge, engines and processes killed."""

import pytest

from simulator.soak.cascading import CascadeSoakRun
from simulator.soak.seeds import SoakChoice, replay_command
from tests.sim.soak_seeds import replayed_by, soak_seeds


@pytest.mark.parametrize("seed", soak_seeds(4))
def test_cascades_survive_random_faults(seed: int) -> None:
    run = CascadeSoakRun(seed)
    with replayed_by(replay_command(seed, SoakChoice(cascades=True))):
        report = run.run()
    assert report.outcomes.get("completed", 0) > 0
    assert sum(run.watch.reasons.values()) > 0, "nothing was delivered"


def test_every_way_through_a_cascade_is_taken_without_faults() -> None:
    run = CascadeSoakRun(3, faults=False, rate=30.0)
    report = run.run()
    assert set(report.outcomes) <= {"completed", "abandoned"}
    assert {"delivered", "rejected", "rejected_early"} <= set(run.watch.attempts)
    assert {"score", "last_tier"} <= set(run.watch.reasons)
