"""Policies from files in a whole simulated cluster: the example, and some that fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from millrace.enginemodel.coefficients import load_step_time

from simulator.scenarios.reading import read_scenario
from simulator.scenarios.running import run_scenario

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = ("workload.count=120", "workload.warm_up=0", f"dispatch.policy={EXAMPLES / 'policy' / 'considerate.py'}")


def test_requests_are_served_on_predictions_and_mostly_by_instances_that_are_twice_as_fast() -> None:
    spec = read_scenario(EXAMPLES / "scenarios" / "mixed.toml", SETTINGS)
    outcome = run_scenario(spec, step_times=load_step_time)
    assert outcome.outcomes == {"completed": 120}
    assert outcome.fallbacks == 0
    assert min(record.predicted_e2e_ns for record in outcome.finished) > 0
    fast = sum(record.instance.startswith("fast") for record in outcome.finished)
    assert fast > 2 * (len(outcome.finished) - fast)


RAISES = """
def decide(view, parameters, state, now_ns, rng):
    if now_ns % 2 >= 0:
        raise RuntimeError("no idea")
"""

ASKS = """
from millrace.policies.dispatch import QueryParameters


class Parameters(QueryParameters, frozen=True, kw_only=True):
    pass


def ask(view, parameters, rng):
    return view.no_such_field


def decide(view, parameters, state, now_ns, rng):
    raise AssertionError("ask has failed before")
"""


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        pytest.param(RAISES, 4, "RuntimeError.*no idea", id="decide raises"),
        pytest.param(ASKS, 10, "AttributeError.*no_such_field", id="ask raises"),
    ],
)
def test_a_policy_that_raises_ends_the_run_with_file_and_line(text: str, line: int, error: str, tmp_path: Path) -> None:
    file = tmp_path / "clueless.py"
    file.write_text(text)
    scenario = str(EXAMPLES / "scenarios" / "mixed.toml")
    words = ["--set", "workload.count=5", "--set", "workload.warm_up=0", "--set", f"dispatch.policy={file}"]
    command = [sys.executable, "-m", "simulator", "sim", "--scenario", scenario, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{file}:{line}" in done.stderr
    assert re.search(error, done.stderr)
