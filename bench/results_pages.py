"""Figures and runs as JSON, and the pages that are generated from them: ``python -m bench --pages``.

Each area has a file: ``bench/results/AREA.json``, or ``papers/PAPER/results.json``. A **figure** is one value with the
command, machine and commit that it was measured with; None where the record lacks one. A **run** is a printed table.
``python -m bench NAME --save`` puts a run into its area in place of the one before under the same title, with the
figures that the bench reports (``report``); all others keep their own commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
#: Arguments that make a run of its own; all others vary the same one.
PARTS = frozenset({"--parts", "--unequal", "--router", "--engine"})

_HEAD = "<!-- Generated from {source} by `python -m bench --pages`; edit that. -->"
_INTRODUCTION = """# Results

The figures that matter, each with the command and the commit that it was measured with; all others, and the printed tables, are in the pages of their areas: {areas}. Papers keep theirs: {papers}. *Met* and *missed* are against an aim that was set before the measurement. What is not here has not been measured.

The machine is two shared cores of an AMD EPYC with 24 GiB and no GPU, unless a page says otherwise; engines are vLLM on a CPU with the models of `models/`. It is noisy, and ratios hold better than rates. Figures in virtual time do not depend on it. `python -m bench` lists all benches, `python -m bench NAME --save` measures one again, and `python -m bench --check` lists figures that are older than the code that they measure.
"""  # noqa: E501 - lines of a document


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Command, date, machine and commit (``+``: the tree differed) of a measurement; ``note``: its circumstances."""

    command: str | None = None
    date: str | None = None
    machine: str | None = None
    commit: str | None = None
    note: str | None = None


class Figure(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One value.

    Attributes:
        bench: Name of the bench that measures it.
        claim: What was measured.
        value: With its unit; several for several cases that the claim names in the same order.
        interval: 95 % interval or spread, where the value does not say it.
        verdict: How the value compares with the aim, which was set before the measurement.
        key: Name under which the bench reports it; empty where it does not.
        retired: The bench is gone; the commit has it.
        matters: Whether it stands on the first page.
    """

    bench: str
    claim: str
    value: str
    interval: str | None = None
    aim: str | None = None
    verdict: str | None = None
    key: str = ""
    matters: bool = False
    retired: bool = False
    origin: Origin = Origin()


class Run(msgspec.Struct, kw_only=True):
    """Printed output of a bench."""

    title: str
    origin: Origin
    output: str


class Area(msgspec.Struct, kw_only=True):
    """One file; ``about`` is a sentence."""

    title: str
    about: str
    figures: list[Figure] = []
    runs: list[Run] = []


#: Figures that the bench that runs now has reported: key -> (value, interval).
_REPORTED: dict[str, tuple[str, str | None]] = {}


def report(key: str, value: str, interval: str | None = None) -> None:
    """Notes the value of a figure that has this key; ``--save`` writes it."""
    _REPORTED[key] = (value, interval)


def area_files(root: Path = ROOT) -> list[Path]:
    """All JSON files: areas of the core, then papers."""
    return [*sorted((root / "bench" / "results").glob("*.json")), *sorted(root.glob("papers/*/results.json"))]


def read_area(path: Path) -> Area:
    """One file."""
    return msgspec.json.decode(path.read_bytes(), type=Area)


def write_area(path: Path, area: Area) -> None:
    """Writes one file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(area), indent=1) + b"\n")


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Every generated page by its path below the root."""
    files = {path.relative_to(root): read_area(path) for path in area_files(root)}
    found = {_page_of(path): _area_page(path, area) for path, area in files.items()}
    return {Path("bench/RESULTS.md"): _first_page(files), **found}


def write_pages(root: Path = ROOT) -> None:
    """Writes them."""
    for path, text in pages(root).items():
        (root / path).write_text(text)


def save(name: str, words: Sequence[str], stamp: str, output: str, root: Path = ROOT) -> Path:
    """Puts a run and the reported figures into the area of the bench; returns its file."""
    path = _file_of(name, root)
    area = read_area(path) if path.exists() else Area(title=path.stem.capitalize(), about="")
    date, machine, python, commit = (stamp.split("; ") + [""] * 4)[:4]
    command = " ".join(["python -m bench", name, *("FILE" if "/" in word else word for word in words)])
    origin = Origin(
        command=command, date=date, machine=f"{machine}; {python}", commit=commit.removeprefix("commit ") or None
    )
    run = Run(title=title_of(name, words), origin=origin, output=output.strip())
    others = [each for each in area.runs if each.title != run.title]
    area.runs = sorted([*others, run], key=lambda each: each.title)
    for figure in area.figures:
        if figure.bench == name and figure.key in _REPORTED:
            figure.value, figure.interval = _REPORTED[figure.key]
            figure.origin = origin
    write_area(path, area)
    return path


def title_of(name: str, words: Sequence[str]) -> str:
    """The bench's name with the arguments of ``PARTS`` and their values."""
    kept, keeps = [name], False
    for word in words:
        if word.startswith("--"):
            keeps = word in PARTS
        if keeps:
            kept.append(word)
    return " ".join(kept)


def _file_of(name: str, root: Path) -> Path:
    for path in area_files(root):
        area = read_area(path)
        if name in {figure.bench for figure in area.figures} | {run.title.split()[0] for run in area.runs}:
            return path
    paper = next(root.glob(f"papers/*/bench/{name}.py"), None)
    return paper.parents[1] / "results.json" if paper else root / "bench" / "results" / "others.json"


def _page_of(path: Path) -> Path:
    return path.with_suffix(".md") if path.parts[0] == "bench" else path.with_name("RESULTS.md")


def _first_page(files: dict[Path, Area]) -> str:
    links = {path: f"[{area.title}]({_relative(_page_of(path))})" for path, area in files.items()}
    areas, papers = (
        ", ".join(link for path, link in links.items() if (path.parts[0] == "bench") is own) for own in (True, False)
    )
    parts = [_HEAD.format(source="the JSON files beside it"), _INTRODUCTION.format(areas=areas, papers=papers)]
    for area in files.values():
        matter = [figure for figure in area.figures if figure.matters]
        if matter:
            parts.append(f"## {area.title}\n\n{_table(matter)}")
    return "\n".join(parts)


def _relative(page: Path) -> str:
    return str(page.relative_to("bench")) if page.parts[0] == "bench" else f"../{page}"


def _area_page(path: Path, area: Area) -> str:
    parts = [_HEAD.format(source=f"`{path.name}`"), f"# {area.title}: results\n", f"{area.about}\n"]
    if area.figures:
        parts.append(_table(area.figures))
    parts += [f"## {run.title}\n\n{_told(run.origin)}\n\n```\n{run.output}\n```\n" for run in area.runs]
    return "\n".join(parts)


def _table(figures: Iterable[Figure]) -> str:
    lines = ["| figure | aim | measured | | bench, commit |", "|---|---|---|---|---|"]
    for figure in figures:
        value = f"{figure.value} {figure.interval}" if figure.interval else figure.value
        bench = f"`{figure.bench}`{' (retired)' if figure.retired else ''}"
        where = f"{bench}, {figure.origin.commit or 'commit not recorded'}"
        cells = (figure.claim, figure.aim or "", value, figure.verdict or "", where)
        lines.append("| " + " | ".join(re.sub(r"\s*\n\s*", " ", cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _told(origin: Origin) -> str:
    commit = f"commit {origin.commit}" if origin.commit else "commit not recorded"
    stamp = "; ".join(each for each in (origin.date, origin.machine, commit, origin.note) if each)
    return f"`{origin.command}`\n\n{stamp}" if origin.command else stamp
