"""Groups of tests: `setup/run_tests.py` runs every test file once, but those that have a command of their own."""

from collections import Counter
from pathlib import Path

from setup import run_tests

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (*sum(run_tests.PURE.values(), ()), *run_tests.PROCESSES)


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def test_every_test_is_in_one_group(monkeypatch):
    monkeypatch.setattr(run_tests.importlib.util, "find_spec", lambda _: object())
    groups = run_tests.all_groups()
    taken = Counter(file for paths in groups.values() for path in paths for file in _files(ROOT / path))
    wanted = {file for folder in FOLDERS for file in _files(ROOT / folder)}
    assert set(taken) == wanted - {ROOT / path for path in run_tests.APART}
    assert set(taken.values()) == {1}
    assert sorted(groups) == sorted((*run_tests.WAITING, *run_tests.COMPUTING))


def test_folders_without_processes_and_with_them_are_all_that_a_whole_run_covers():
    named = {Path(path).name for path in FOLDERS if path.startswith("tests/")}
    by_name_only = {"clients", "compose", "gpu", "model"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    assert folders - by_name_only == named


def test_what_a_fast_run_names_or_leaves_out_exists():
    assert not [path for path in (*run_tests.FAST, *run_tests.SLOW, *run_tests.APART) if not (ROOT / path).exists()]
