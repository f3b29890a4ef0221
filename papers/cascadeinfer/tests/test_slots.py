"""Policies of the paper through the core's slots, in a whole simulated cluster."""

from typing import Any

from millrace.enginemodel.coefficients import load_step_time

from papers import PAPERS
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import run_scenario

#: Long and mixed lengths on eight instances.
SCENARIO: dict[str, Any] = {
    "cluster": {"groups": [{"name": "w", "instances": 8, "step_time": "h200-llama-3-8b"}]},
    "workload": {
        "count": 300,
        "warm_up": 0,
        "output_limit": 3_000,
        "arrivals": {"kind": "poisson", "rate_per_s": 20.0},
        "lengths": {"kind": "fitted", "name": "reasoning-sharegpt"},
    },
    "migration": {"on": True},
    "trading": {"policy": f"{PAPERS}/cascadeinfer/trading.py"},
}


def test_a_planner_by_its_path_plans_and_running_requests_are_handed_on() -> None:
    parameters = {"requests_min": 50, "change_margin": 0.0}
    stages = {"policy": f"{PAPERS}/cascadeinfer/chain.py", "parameters": parameters, "period_s": 5}
    outcome = run_scenario(scenario_of({**SCENARIO, "stages": stages}), step_times=load_step_time)
    assert outcome.outcomes == {"completed": 300}
    assert len(outcome.migrations) > 100, "by balance alone they are some dozen"
