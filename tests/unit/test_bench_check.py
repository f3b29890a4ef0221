"""`bench --check`: claims against a made-up history, and budgets against made-up ratios."""

import subprocess
from pathlib import Path

import pytest

import bench
from bench.budgets import Budget, Verdict, judged
from bench.claims import findings
from bench.measured import MEASURED
from bench.results_pages import Area, Figure, Origin, Run, read_area, report, save, write_area

ROOT = Path(bench.__file__).resolve().parent.parent


def git(root: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def commit(root: Path, text: str) -> str:
    """Change the code and commit it; returns the short hash."""
    (root / "code").mkdir(exist_ok=True)
    (root / "code" / "slow.py").write_text(text)
    git(root, "add", ".")
    git(root, "commit", "-qm", text)
    return git(root, "rev-parse", "--short=7", "HEAD")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with code that changed after one of two runs."""
    git(tmp_path, "init", "-q", "-b", "main")
    first = commit(tmp_path, "1")
    git(tmp_path, "checkout", "-qb", "side")
    aside = commit(tmp_path, "aside")
    git(tmp_path, "checkout", "-q", "main")
    second = commit(tmp_path, "2")
    commits = {"fast": second, "slow": f"{first}+", "forged": "0123456", "aside": aside, "bare": None, "other": first}
    figures = [
        Figure(bench=bench, claim=f"of {bench}", value="1", origin=Origin(commit=each))
        for bench, each in commits.items()
    ]
    (tmp_path / "bench" / "results").mkdir(parents=True)
    write_area(tmp_path / "bench" / "results" / "some.json", Area(title="Some", about="", figures=figures))
    return tmp_path


def test_lists_figures_of_older_code_and_of_no_commit(root: Path) -> None:
    measured = dict.fromkeys(("fast", "slow", "forged", "aside", "bare"), ("code",))
    found = {one.figure.bench: one for one in findings(root, measured)}
    assert list(found) == ["slow", "forged", "aside", "bare"]
    assert {bench for bench, one in found.items() if one.gone} == {"forged", "aside", "bare"}
    assert found["slow"].why.startswith("1 changes of the code that it measures since ")
    assert "not in the history" in found["aside"].why


def test_a_run_that_is_saved_replaces_its_own_and_only_the_figures_that_are_reported(root: Path) -> None:
    report("p50", "7 ms", "[6, 8]")
    path = root / "bench" / "results" / "some.json"
    area = read_area(path)
    area.figures.append(Figure(bench="fast", claim="reported", value="9 ms", key="p50"))
    area.runs = [Run(title=title, origin=Origin(), output="old") for title in ("fast", "fast --parts a")]
    write_area(path, area)
    words = ["--parts", "a", "--rows", "/tmp/x"]
    assert save("fast", words, "2026-12-01; a machine; Python 3; commit 7654321", "new\n", root) == path
    after = read_area(path)
    assert [(run.title, run.output) for run in after.runs] == [("fast", "old"), ("fast --parts a", "new")]
    assert after.figures[:-1] == area.figures[:-1]
    assert (after.figures[-1].value, after.figures[-1].interval) == ("7 ms", "[6, 8]")
    assert after.figures[-1].origin.command == "python -m bench fast --parts a --rows FILE"
    assert (after.figures[-1].origin.machine, after.figures[-1].origin.commit) == ("a machine; Python 3", "7654321")


def test_every_path_that_is_measured_exists() -> None:
    assert [path for paths in MEASURED.values() for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("ratio", "word"), [(1.0, "ok"), (1.02, "ok"), (1.04, "DEARER"), (0.96, "lower")])
def test_a_budget_is_judged_by_the_instructions_beside_the_reference(ratio: float, word: str) -> None:
    assert judged(Budget("a", ("x",)), {("x",): ratio}.__getitem__) == Verdict(word, ratio)
