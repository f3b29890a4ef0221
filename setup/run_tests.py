"""Runs the tests; the last line says how it ended.

    python setup/run_tests.py                 # everything
    python setup/run_tests.py --fast          # what needs no engine and no process
    python setup/run_tests.py tests/unit -k broker

Tests that compute run in two lanes side by side, each on cores of its own: engines beside each other on the same cores
would take turns, and a thread pool that spins for its turn takes more than half of both. A lane that has ended a group
of tests takes the next one, short ones last, so that both end together. Groups that mostly wait run beside them, on any
core; engines let their services go first. On one core, and where arguments for pytest are given, there is one run.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Folders without sockets, clocks or sleeps; conftest.py holds them to it (tidy only reads files).
PURE = {"unit": ("tests/tidy", "tests/unit"), "sim": ("tests/sim", "papers")}
#: Folders whose tests start processes.
PROCESSES = ("tests/contract", "tests/live", "tests/engine")
#: All groups, each for one run of pytest. Tests that share an engine or a cluster are in one group, and each group with
#: real engines imports vLLM once more. A group without I/O has one process on one core: two workers of pytest-xdist
#: would both import all of its tests.
GROUPS = PURE | {
    "live-a-d": ("tests/live/test_[a-d]*.py",),
    "live-e-l": ("tests/live/test_[e-l]*.py",),
    "live-m-z": ("tests/live/*",),
    "clusters": (
        "tests/engine/two_engines",
        "tests/engine/test_*_cluster*.py",
        "tests/engine/test_images.py",
        "tests/engine/test_profile_vllm.py",
    ),
    "engines": ("tests/engine/*", "tests/contract/engine"),
    "contract": ("tests/contract/*",),
}
#: Minutes each, and on a full machine many: Chromium draws by software (`./task test:page`), the autopilot's replays
#: give way to everything (`./task test tests/live/test_autopilot_on.py`).
APART = ("tests/live/test_page_browser.py", "tests/live/test_autopilot_on.py")
#: Groups that wait for most of their time, for half a core or less: beside the lanes.
WAITING = ("live-a-d", "live-e-l", "live-m-z")
#: Lanes of the other groups, and the order in which they take them: the longest first, and what fails quickly.
LANES = 2
COMPUTING = ("engines", "unit", "clusters", "sim", "contract")
#: Suites that are quick and touch every layer.
FAST = (
    "tests/tidy",
    "tests/unit",
    "tests/sim/test_runtime_sim.py",
    "tests/sim/test_scenarios.py",
    "tests/sim/test_several_models.py",
    "tests/sim/test_permissions.py",
)
#: Files of those that ``--fast`` leaves to the whole run: plans of cascades, a
#: quarter of the processor time of tests/unit.
SLOW = (
    "papers/cascadia/tests/test_baselines.py",
    "tests/unit/test_cascade_planner.py",
)


def main(words: list[str]) -> int:
    """Runs what the words ask for; returns the first status that is not 0."""
    cores = _cores()
    if words == ["--fast"]:
        return _told(_pytest(*_parallel(len(cores)), *(f"--ignore={path}" for path in SLOW), *FAST))
    if words:
        return _told(_pytest(*words))
    if len(cores) < LANES:
        return _told(_pytest(*(f"--ignore={path}" for path in APART), *sum(PURE.values(), ()), *PROCESSES))
    return _told(_lanes(cores))


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _parallel(cores: int) -> list[str]:
    return ["-n", str(cores), "--dist", "worksteal"] if cores > 1 else []


def _pytest(*words: str) -> int:
    # Colours and progress as pytest chooses: its streams are this process's own.
    command = [sys.executable, "-m", "pytest", *words]
    return subprocess.run(command, cwd=ROOT, env=_environment(), check=False).returncode


def _environment() -> dict[str, str]:
    """This process's, but bytecode is kept: else each run, and each program that a test starts, compiles everything."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _lanes(cores: list[int]) -> int:
    """Runs all groups: those of the lanes on cores of a lane each, those that wait on any."""
    groups = all_groups()
    computing = deque(name for name in COMPUTING if name in groups)
    share = len(cores) // LANES
    queues = [(computing, cores[lane * share :][:share]) for lane in range(LANES)]
    queues += [(deque([name]), cores) for name in WAITING]
    runs: list[Run] = []
    lanes = [threading.Thread(target=_lane, args=(names, groups, own, runs)) for names, own in queues]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    for run in runs:
        print("\n".join([run.closing, *run.failed]), flush=True)
    return next((run.wait() for run in runs if run.wait()), 0)


def _lane(names: deque[str], groups: dict[str, list[str]], cores: list[int], runs: list["Run"]) -> None:
    """Runs one group after the other on these cores, until none is left."""
    while names:
        try:
            name = names.popleft()
        except IndexError:  # the other lane was faster
            return
        spread = _parallel(len(cores)) if name in PURE else []
        run = Run(name, [*_pinned(cores), *_command(name, *spread, *groups[name])])
        runs.append(run)
        run.wait()


def all_groups() -> dict[str, list[str]]:
    """Paths of each group, every test in the first one that names it; without vLLM none of tests/engine."""
    groups: dict[str, list[str]] = {}
    taken = {ROOT / path for path in APART}
    for name, patterns in GROUPS.items():
        found = {path for pattern in patterns for path in ROOT.glob(pattern) if _holds_tests(path)} - taken
        taken |= found
        groups[name] = sorted(str(path.relative_to(ROOT)) for path in found)
    return {name: paths for name, paths in groups.items() if paths}


def _holds_tests(path: Path) -> bool:
    if path.is_relative_to(ROOT / "tests/engine") and importlib.util.find_spec("vllm") is None:
        return False
    return any(path.glob("**/test_*.py")) if path.is_dir() else path.match("test_*.py")


def _pinned(cores: list[int]) -> list[str]:
    """Words that keep a command on these cores, where the system can do it."""
    return ["taskset", "-c", ",".join(map(str, cores))] if shutil.which("taskset") else []


def _command(lane: str, *words: str) -> list[str]:
    colour = ["--color=yes"] if sys.stdout.isatty() and "NO_COLOR" not in os.environ else []
    return [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{lane}", *colour, *words]


class Run:
    """One run of pytest, perhaps beside others; its lines are printed with its name before them.

    Attributes:
        closing: Its last line, with its name and how long it took.
        failed: Lines of its summary that name a test that failed, with its name before them.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.closing = ""
        self.failed: list[str] = []
        self._name = name
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._print)
        self._reader.start()

    def wait(self) -> int:
        """Return its exit status once it has ended."""
        self._reader.join()
        return self._process.wait()

    def _print(self) -> None:
        assert self._process.stdout is not None
        last = ""
        for line in self._process.stdout:
            last = line.rstrip("\n") or last
            print(f"{self._name:<8} | {line}", end="", flush=True)
            if line.startswith(("FAILED ", "ERROR ")):
                self.failed.append(f"{self._name:<8} | {last}")
        self.closing = f"{self._name:<8} | {last} after {time.monotonic() - self._began:.0f} s"


def _told(status: int) -> int:
    print("test: passed" if status == 0 else f"test: FAILED (pytest ended with status {status})", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
