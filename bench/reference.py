"""The hot path of an earlier commit beside the present one: processor time of the one over that of the other.

Two processes serve a few requests in turn, on one core. What disturbs one disturbs the other alike: the machine's pace,
other jobs in its caches, what the hypervisor takes. A calibration loop of other code does not stand for that: beside
other load its ratio differs by a tenth from one process to the next, and this one by a hundredth.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
#: Turns of each of the two, and requests of a turn: so many that the caches are its own again after the first.
TURNS, TURN_REQUESTS = 300, 4


class EarlierCodeError(Exception):
    """The earlier commit is missing, or its code does not run with the libraries that are installed."""


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the code of a commit and the present benches, gone afterwards.

    Raises:
        EarlierCodeError: the history does not have it.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode:
            raise EarlierCodeError(archive.stderr.decode().strip())
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        shutil.rmtree(tree / "bench")
        shutil.copytree(ROOT / "bench", tree / "bench", ignore=shutil.ignore_patterns("results", "recordings"))
        yield tree


def ratio(earlier: Path, words: Sequence[str]) -> float:
    """CPU time of the present code over that of an earlier tree, the same requests.

    Args:
        words: Of ``hot_path``.

    Raises:
        EarlierCodeError: one of them does not run.
    """
    serving_ns = [0, 0]
    with one_core(), HotPathProcess(ROOT, words) as present, HotPathProcess(earlier, words) as past:
        pair = (present, past)
        for turn in range(TURNS):
            for which in (0, 1) if turn % 2 else (1, 0):
                serving_ns[which] += pair[which].serve(TURN_REQUESTS)
    return serving_ns[0] / serving_ns[1]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Run this process and those that it starts on one core, so that nothing comes between two turns."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class HotPathProcess:
    """A process that serves when it is told to."""

    def __init__(self, tree: Path, words: Sequence[str]) -> None:
        self._tree = tree
        self._words = words

    def __enter__(self) -> HotPathProcess:
        """Start and warm it up."""
        command = [sys.executable, "-m", "bench.hot_path", "--in-turn", *self._words]
        path = os.pathsep.join([str(self._tree / "libs"), str(self._tree), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=self._tree, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1
        )
        self._answer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End it."""
        self._process.communicate(timeout=60)

    def serve(self, requests: int) -> int:
        """Nanoseconds of CPU of so many requests."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{requests}\n")
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, told = self._process.communicate(timeout=60)
            raise EarlierCodeError(f"{self._tree.name}: hot_path does not run: {told.strip().rpartition(chr(10))[2]}")
        return line
