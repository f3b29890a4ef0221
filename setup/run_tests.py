"""Runs the tests; the last line says how it ended.

    python setup/run_tests.py                 # everything
    python setup/run_tests.py --fast          # what needs no engine and no process
    python setup/run_tests.py tests/unit -k broker

Tests without I/O share all cores. Tests that start processes run one after the other: engines use whole cores, and what
they are tested for (pauses, time-outs, recovery) does not hold beside others. Words for pytest are passed on as they
are, in one run.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Folders without sockets, clocks or sleeps; tests/conftest.py holds them to it (tidy only reads files).
PURE = ("tests/tidy", "tests/unit", "tests/sim")
#: Folders whose tests start processes.
PROCESSES = ("tests/contract", "tests/live", "tests/engine")
#: Suites that are quick and touch every layer.
FAST = (
    "tests/tidy",
    "tests/unit",
    "tests/sim/test_runtime_sim.py",
    "tests/sim/test_scenarios.py",
    "tests/sim/test_several_models.py",
    "tests/sim/test_permissions.py",
)


def main(words: list[str]) -> int:
    """Runs what the words ask for; returns the first status that is not 0."""
    if words == ["--fast"]:
        return _told(_pytest(*_parallel(), *FAST))
    if words:
        return _told(_pytest(*words))
    statuses = [_pytest(*_parallel(), *PURE), _pytest(*PROCESSES)]
    return _told(next((status for status in statuses if status), 0))


def _parallel() -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ["-n", str(cores), "--dist", "worksteal"] if cores > 1 else []


def _pytest(*words: str) -> int:
    # Colours and progress as pytest chooses: its streams are this process's own.
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False).returncode


def _told(status: int) -> int:
    print("test: passed" if status == 0 else f"test: FAILED (pytest ended with status {status})", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
