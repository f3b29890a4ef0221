"""Policies from files in a whole simulated cluster: the example, and some that fail."""

import re
import subprocess
import sys
from pathlib import Path

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


def test_a_policy_that_raises_ends_the_run_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "clueless.py"
    file.write_text(RAISES)
    scenario = str(EXAMPLES / "scenarios" / "mixed.toml")
    words = ["--set", "workload.count=5", "--set", "workload.warm_up=0", "--set", f"dispatch.policy={file}"]
    command = [sys.executable, "-m", "simulator", "sim", "--scenario", scenario, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{file}:4" in done.stderr
    assert re.search("RuntimeError.*no idea", done.stderr)
