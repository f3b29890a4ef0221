"""The example policy, from its file, in a whole simulated cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from millrace.enginemodel.coefficients import load_step_time

from simulator.scenarios.reading import read_scenario
from simulator.scenarios.running import Outcome, run_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = ("workload.count=120", "workload.warm_up=0", f"dispatch.policy={EXAMPLES / 'policy' / 'considerate.py'}")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run_scenario(read_scenario(EXAMPLES / "scenarios" / "mixed.toml", SETTINGS), step_times=load_step_time)


def test_every_request_is_served_on_predictions(outcome: Outcome) -> None:
    assert outcome.outcomes == {"completed": 120}
    assert outcome.fallbacks == 0
    assert min(record.predicted_e2e_ns for record in outcome.finished) > 0


def test_it_likes_the_instances_that_are_twice_as_fast(outcome: Outcome) -> None:
    fast = sum(record.instance.startswith("fast") for record in outcome.finished)
    assert fast > 2 * (len(outcome.finished) - fast)
