"""Figures against the history: those that rest on a commit that is gone, or on code that changed since.

That the code changed says that nobody has measured again, not that the figure is wrong.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.results_pages import Figure, area_files, read_area

_COMMIT = re.compile(r"\b[0-9a-f]{7,40}\b")


class Finding(msgspec.Struct, frozen=True):
    """A figure that is not one of the present code.

    Attributes:
        gone: It names no commit of the history; else the code has changed since.
    """

    figure: Figure
    why: str
    gone: bool


def findings(root: Path, measured: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Check all figures of a checkout that a bench measures.

    Args:
        root: Its folder.
        measured: Bench -> paths of the code that it measures.
    """
    figures = [figure for path in area_files(root) for figure in read_area(path).figures if figure.bench in measured]
    verdict = functools.cache(lambda commits, bench: _verdict(root, commits, measured[bench]))
    told = [(figure, *verdict(figure.origin.commit or "", figure.bench)) for figure in figures]
    return [Finding(figure, why, gone=gone) for figure, why, gone in told if why]


def _verdict(root: Path, stamp: str, paths: Sequence[str]) -> tuple[str, bool]:
    """Fault of a commit, empty for none; and whether it is gone."""
    commits = _COMMIT.findall(stamp)
    if not commits:
        return "it names no commit", True
    for commit in commits:
        if not _is_ancestor(root, commit):
            return f"commit {commit} is not in the history", True
    changes = _git(root, "log", "--format=%h", f"{commits[-1]}..HEAD", "--", *paths).stdout.split()
    if not changes:
        return "", False
    return f"{len(changes)} changes of the code that it measures since {commits[-1]}, the last is {changes[0]}", False


def _is_ancestor(root: Path, commit: str) -> bool:
    return _git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
