"""The cluster under random harm with a policy that asks predictors: they die and are cut off like the others."""

import pytest
from millrace.enginemodel.coefficients import load_step_time

from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import run_scenario
from tests.sim.soak_seeds import passed, soak_seeds


@pytest.mark.parametrize("seed", soak_seeds(4))
def test_random_faults_break_no_promise_with_forecasts(seed: int) -> None:
    assert passed(seed, "forecast").outcomes["completed"] > 0


def test_without_a_predictor_alive_the_fallback_decides_and_no_call_fails() -> None:
    table = {
        "cluster": {"groups": [{"instances": 3}]},
        "dispatch": {"policy": "forecast"},
        "workload": {"count": 150, "arrivals": {"kind": "poisson", "rate_per_s": 20.0}},
        "faults": [{"at_s": float(second), "kind": "kill", "target": "predictor-0"} for second in range(2, 9)],
    }
    outcome = run_scenario(scenario_of(table), step_times=load_step_time)
    assert outcome.outcomes == {"completed": 150}
    assert outcome.fallbacks > 0
