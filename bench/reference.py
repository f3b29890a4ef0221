"""The hot path of an earlier commit beside the present one: instructions of the one over those of the other."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.instructions import SECONDS_MAX, tree_environment

ROOT = Path(__file__).resolve().parent.parent
#: What makes ``hot_path`` count instructions.
COUNTED = ("--counted", "--requests", "100")
_COUNT = re.compile(r"([\d,]+) instructions per request")


class EarlierCodeError(Exception):
    """The earlier commit is missing, or its code does not run with the libraries that are installed."""


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the code of a commit, compiled, and the present benches, gone afterwards.

    Raises:
        EarlierCodeError: the history does not have it, or it cannot be compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode:
            raise EarlierCodeError(archive.stderr.decode().strip())
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        shutil.rmtree(tree / "bench")
        shutil.copytree(ROOT / "bench", tree / "bench", ignore=shutil.ignore_patterns("results", "recordings"))
        _build_native(tree)
        yield tree


def _build_native(tree: Path) -> None:
    """Build the tree's own compiled parts into it (a minute). Code that finds another version's may do without."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--target", str(tree), "./native"]
    built = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if built.returncode:
        raise EarlierCodeError(f"its compiled parts cannot be built: {built.stderr.strip()[-500:]}")


def ratio(earlier: Path, words: Sequence[str]) -> float:
    """Instructions of a request of the present code over those of an earlier tree.

    Args:
        words: Of ``hot_path``.

    Raises:
        EarlierCodeError: one of them does not run.
    """
    return _count(ROOT, words) / _count(earlier, words)


def _count(tree: Path, words: Sequence[str]) -> int:
    command = [sys.executable, "-m", "bench.hot_path", *words, *COUNTED]
    done = subprocess.run(
        command, cwd=tree, env=tree_environment(tree), capture_output=True, text=True, check=False, timeout=SECONDS_MAX
    )
    found = _COUNT.search(done.stdout)
    if found is None:
        raise EarlierCodeError(f"{tree.name}: hot_path does not run: {done.stderr.strip().rpartition(chr(10))[2]}")
    return int(found[1].replace(",", ""))
