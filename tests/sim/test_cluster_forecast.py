"""The cluster under random harm with a policy that asks predictors: they die and are cut off like the others."""

import pytest
from millrace.actor.effects import Effect, Publish
from millrace.contracts.catalog import Role
from millrace.contracts.message import Message
from millrace.contracts.observers import DecisionMade
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import SECOND

from simulator.soak.run import SoakRun
from simulator.soak.seeds import PREDICTORS, shape_for
from tests.sim.soak_seeds import passed, soak_seeds


class Fallbacks(Checker):
    """Counts decisions without forecasts."""

    def __init__(self) -> None:
        self.count = 0

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish) and isinstance(effect.body, DecisionMade) and effect.body.chosen:
                self.count += bool(effect.body.fallback)


@pytest.mark.parametrize("seed", soak_seeds(4))
def test_random_faults_break_no_promise_with_forecasts(seed: int) -> None:
    assert passed(seed, "forecast").outcomes["completed"] > 0


def test_without_a_predictor_alive_the_fallback_decides_and_no_call_fails() -> None:
    scenario = SoakRun(2, shape=shape_for("forecast"), faults=False)
    cluster = scenario.cluster
    predictors = cluster.of_role(Role.PREDICTOR)
    assert len(predictors) == PREDICTORS
    fallbacks = Fallbacks()
    cluster.simulation.check_with(fallbacks)

    def kill_all() -> None:
        for actor in predictors:
            cluster.simulation.faults.kill(actor)

    for at_s in range(2, 9):
        cluster.simulation.after(at_s * SECOND, kill_all)
    report = scenario.run()
    assert fallbacks.count > 0
    assert set(report.outcomes) <= {"completed", "abandoned"}
