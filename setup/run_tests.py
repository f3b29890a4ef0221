"""Runs the tests; the last line says how it ended.

    python setup/run_tests.py                 # everything
    python setup/run_tests.py --fast          # what needs no engine and no process
    python setup/run_tests.py tests/unit -k broker

Tests without I/O come first, on all cores. Tests that start processes then run in two lanes side by side, each on cores
of its own: engines beside each other on the same cores would take turns, and a thread pool that spins for its turn
takes more than half of both. On one core, and where arguments for pytest are given, there is one run.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Folders without sockets, clocks or sleeps; tests/conftest.py holds them to it (tidy only reads files).
PURE = ("tests/tidy", "tests/unit", "tests/sim")
#: Folders whose tests start processes, by lane.
PROCESSES = {"engines": ("tests/contract", "tests/engine"), "clusters": ("tests/live",)}
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
    cores = _cores()
    if words == ["--fast"]:
        return _told(_pytest(*_parallel(len(cores)), *FAST))
    if words:
        return _told(_pytest(*words))
    if len(cores) < 2:
        return _told(_pytest(*PURE, *(folder for lane in PROCESSES.values() for folder in lane)))
    return _told(_lanes(cores))


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _parallel(cores: int) -> list[str]:
    return ["-n", str(cores), "--dist", "worksteal"] if cores > 1 else []


def _pytest(*words: str) -> int:
    # Colours and progress as pytest chooses: its streams are this process's own.
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False).returncode


def _lanes(cores: list[int]) -> int:
    """Runs tests without I/O on all cores, then those that start processes, the cores divided between their lanes."""
    pure = Lane("pure", _command("pure", *_parallel(len(cores)), *PURE))
    first = pure.wait()
    half = len(cores) // 2
    shares = dict(zip(PROCESSES, (cores[:half], cores[half:]), strict=True))
    lanes = [Lane(name, [*_pinned(shares[name]), *_command(name, *folders)]) for name, folders in PROCESSES.items()]
    statuses = [first, *(lane.wait() for lane in lanes)]
    for lane in (pure, *lanes):
        print(lane.closing, flush=True)
    return next((status for status in statuses if status), 0)


def _pinned(cores: list[int]) -> list[str]:
    """Words that keep a command on these cores, where the system can do it."""
    return ["taskset", "-c", ",".join(map(str, cores))] if shutil.which("taskset") else []


def _command(lane: str, *words: str) -> list[str]:
    colour = ["--color=yes"] if sys.stdout.isatty() and "NO_COLOR" not in os.environ else []
    return [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{lane}", *colour, *words]


class Lane:
    """One run of pytest beside others; its lines are printed with its name before them.

    Attributes:
        closing: Its last line, with its name and how long it took.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.closing = ""
        self._name = name
        self._began = time.monotonic()
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
        self.closing = f"{self._name:<8} | {last} after {time.monotonic() - self._began:.0f} s"


def _told(status: int) -> int:
    print("test: passed" if status == 0 else f"test: FAILED (pytest ended with status {status})", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
