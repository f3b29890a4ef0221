"""Seeds of random faults in tests: half of them fixed, half drawn from the commit, so that each commit explores."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from millrace.sim.failure import SimulationFailed

from simulator.soak.run import SoakReport
from simulator.soak.seeds import POLICY, SoakChoice, replay_command, run_seed

#: Drawn seeds lie below this.
SEED_MAX = 1_000_000


def commit() -> str:
    """Id of the commit under test: MILLRACE_SIM_COMMIT, or git's; empty where there is none."""
    if named := os.environ.get("MILLRACE_SIM_COMMIT"):
        return named
    if shutil.which("git") is None:
        return ""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout.strip()


def soak_seeds(count: int) -> list[int]:
    """So many seeds, or as many as MILLRACE_SIM_SEEDS says: first the fixed ones, then those of the commit."""
    count, of = int(os.environ.get("MILLRACE_SIM_SEEDS", "0")) or count, commit()
    return [*range(count - count // 2), *(_drawn(of, index) for index in range(count // 2))]


def _drawn(of: str, index: int) -> int:
    return int.from_bytes(blake2b(f"{of}/{index}".encode(), digest_size=8).digest(), "big") % SEED_MAX


def passed(seed: int, policy: str = POLICY, **kind: Any) -> SoakReport:
    """The report of a seed; ``kind``: fields of ``SoakChoice``. A seed that fails says how it is run again."""
    choice = SoakChoice(policy=policy, **kind)
    result = run_seed(seed, choice)
    if isinstance(result, SoakReport):
        return result
    return pytest.fail(f"{result}\nagain: {replay_command(seed, choice)}")


@contextmanager
def replayed_by(command: str) -> Iterator[None]:
    """For runs that ``run_seed`` does not build: one that fails fails the test, with the command that runs it again."""
    try:
        yield
    except SimulationFailed as failure:
        pytest.fail(f"{failure}\nagain: {command}")


def pytest_command(request: pytest.FixtureRequest) -> str:
    """The command that runs the test again with the seeds of this commit."""
    return f"MILLRACE_SIM_COMMIT={commit()} python -m pytest '{request.node.nodeid}'"
