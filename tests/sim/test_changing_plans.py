"""Clusters whose plan changes every two seconds: what holds without stages holds with them."""

import pytest
from millrace.contracts.catalog import Role
from millrace.sim.runtime_sim import MILLISECOND

from services.coordinator.config import StagesConfig
from simulator.soak.cluster import SoakCluster
from simulator.soak.run import SoakRun
from simulator.soak.shape import SoakShape
from tests.sim.soak_seeds import pytest_command, replayed_by, soak_seeds

#: The best layout of the last few seconds, however little it gains.
CHANGING = StagesConfig(
    policy="exact",
    period_s=2.0,
    window_s=4.0,
    parameters={
        "margin": 0.0,
        "cut_margin": 0.0,
        "change_margin": 0.0,
        "instances_min": 2,
        "requests_min": 5,
        "constraints": {"move_gap_s": 0.0, "spare_deviations": 0.0},
        "bounds": {"loss_max": 1.0},
    },
)
SHAPE = SoakShape(workers=5, stages=CHANGING, planned_as="h200-llama-3-8b")


class PlanLog:
    """Cuts of the plans that were in force, in order."""

    def __init__(self, cluster: SoakCluster) -> None:
        self.cuts: list[list[int]] = []
        self._cluster = cluster
        self.look()

    def look(self) -> None:
        """Looks at the plan ten times a second."""
        processes = [each.process for each in self._cluster.of_role(Role.COORDINATOR)]
        models = [process.actor.snapshot()["models"] for process in processes if process is not None]
        plans = [plan for model in models for plan in model.values()]
        latest = max(plans, key=lambda plan: plan["epoch"], default={"cuts": []})
        if not self.cuts or self.cuts[-1] != latest["cuts"]:
            self.cuts.append(latest["cuts"])
        self._cluster.simulation.after(100 * MILLISECOND, self.look)


@pytest.mark.parametrize("seed", [1, *soak_seeds(2)[1:]])
def test_changing_plans_break_no_promise(seed: int, request: pytest.FixtureRequest) -> None:
    run = SoakRun(seed, shape=SHAPE, rate=30.0)
    log = PlanLog(run.cluster)
    with replayed_by(pytest_command(request)):
        assert run.run().outcomes["completed"] > 50
    assert len(log.cuts) > (2 if seed == 1 else 1), log.cuts  # a drawn seed may have traffic that keeps its plan
    assert max(len(cuts) for cuts in log.cuts) >= 1
