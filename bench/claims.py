"""Claims of RESULTS.md against the history: those that rest on a commit that is gone, or on code that changed since.

A claim is a row of a table in RESULTS.md; it links to its section in ``results/``, whose stamp names the commit. That
the code changed says that nobody has measured again, not that the figure is wrong.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.saving import STAMP, TABLE

_LINK = re.compile(r"\]\(results/([\w.-]+)#([\w-]+)\)")
_HEADING = re.compile(r"^(#{2,3}) (.*)$", re.MULTILINE)
_COMMIT = re.compile(r"\b[0-9a-f]{7,40}\b")


class Claim(msgspec.Struct, frozen=True):
    """A row of RESULTS.md and one section that it rests on.

    Attributes:
        file, anchor: Of the section, as the row links to it.
    """

    text: str
    file: str
    anchor: str


class Run(msgspec.Struct, frozen=True):
    """Stamp of a section.

    Attributes:
        figure: Name of the bench.
        commits: Those that its stamp names.
    """

    figure: str
    commits: tuple[str, ...]


class Finding(msgspec.Struct, frozen=True):
    """A claim whose figures are not those of the present code.

    Attributes:
        gone: It names no commit of the history; else the code has changed since.
    """

    claim: Claim
    why: str
    gone: bool


def claims(results: str) -> list[Claim]:
    """Rows of all tables with the sections that they link to; ``same`` stands for those of the row above."""
    found: list[Claim] = []
    links: list[tuple[str, str]] = []
    for line in results.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) < 3 or set(cells[0]) <= set("-: "):
            continue
        if cells[-1] != "same":
            links = _LINK.findall(cells[-1])
        found += [Claim(cells[0], file, anchor) for file, anchor in links]
    return found


def runs(text: str) -> dict[str, Run]:
    """Sections of one file of results by anchor. One without a stamp of its own has that of the section around it."""
    plain = TABLE.sub(lambda table: re.sub(r"[^\n]", " ", table[0]), text)
    headings = list(_HEADING.finditer(plain))
    found: dict[str, Run] = {}
    around = Run("", ())
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        body = plain[heading.end() : following.start() if following is not None else len(plain)]
        stamp = STAMP.search(body)
        commits = tuple(_COMMIT.findall(stamp[2] or "")) if stamp is not None else ()
        if len(heading[1]) == 2:
            around = Run(heading[2].split()[0], commits)
        found[anchor_of(heading[2])] = Run(around.figure, commits or around.commits)
    return found


def anchor_of(heading: str) -> str:
    """Anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def findings(root: Path, measured: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Check all claims of a checkout.

    Args:
        root: Its folder.
        measured: Figure -> paths of the code that it measures.
    """
    folder = root / "bench"
    sections = {path.name: runs(path.read_text()) for path in (folder / "results").glob("*.md")}
    verdicts: dict[Run, tuple[str, bool]] = {}
    found = []
    for claim in claims((folder / "RESULTS.md").read_text()):
        run = sections.get(claim.file, {}).get(claim.anchor)
        if run is None:
            found.append(Finding(claim, "there is no such section", gone=True))
            continue
        if run not in verdicts:
            verdicts[run] = _verdict(root, run, measured)
        why, gone = verdicts[run]
        if why:
            found.append(Finding(claim, why, gone=gone))
    return found


def _verdict(root: Path, run: Run, measured: Mapping[str, Sequence[str]]) -> tuple[str, bool]:
    """Fault of a run, empty for none; and whether its commit is gone."""
    if not run.commits:
        return "its section names no commit", True
    for commit in run.commits:
        if not _is_ancestor(root, commit):
            return f"commit {commit} is not in the history", True
    paths = measured.get(run.figure)
    if paths is None:
        return f"nobody has said which code {run.figure} measures (bench/measured.py)", False
    since = run.commits[-1]
    changes = _git(root, "log", "--format=%h", f"{since}..HEAD", "--", *paths).stdout.split()
    if not changes:
        return "", False
    return f"{len(changes)} changes of the code that it measures since {since}, the last is {changes[0]}", False


def _is_ancestor(root: Path, commit: str) -> bool:
    return _git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
