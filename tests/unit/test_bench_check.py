"""`bench --check`: claims against a made-up history, and budgets against made-up ratios."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import bench
from bench.budgets import BUDGETS, COUNTED, PAIRS_MAX, Budget, Verdict, judged, judged_by_count
from bench.claims import anchor_of, claims, findings, runs
from bench.hot_path_clock import SECOND_NS, RequestClock, run_by
from bench.instructions import total
from bench.measured import MEASURED
from bench.reference import EarlierCodeError, checked_out

ROOT = Path(bench.__file__).resolve().parent.parent

RESULTS = """# Results

| claim | aim | measured | | where |
|---|---|---|---|---|
| fresh | | 1 | met | [fast](results/some.md#fast) |
| the same | | 2 | met | same |
| old | | 3 | | [slow --parts a](results/some.md#slow---parts-a), [fast](results/some.md#fast) |
| forged | | 4 | | [gone](results/some.md#gone) |
| elsewhere | | 5 | | [side](results/some.md#side) |
| unstamped | | 6 | | [bare](results/some.md#bare) |
| unlisted | | 7 | | [other](results/some.md#other) |
| nowhere | | 8 | | [none](results/some.md#none) |
| explained | | 9 | | [why](../docs/WHY.md#x) |
"""


def git(root: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def commit(root: Path, file: str, text: str) -> str:
    """Write a file and commit it; returns the short hash."""
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)
    git(root, "add", ".")
    git(root, "commit", "-qm", file)
    return git(root, "rev-parse", "--short=7", "HEAD")


def section(name: str, stamp: str) -> str:
    return f"## {name}\n\n`python -m bench {name}`\n\n{stamp}\n\n```\n## not a heading\n```\n\nWords.\n\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with code that changed after one of two runs."""
    git(tmp_path, "init", "-q", "-b", "main")
    first = commit(tmp_path, "code/slow.py", "1")
    git(tmp_path, "checkout", "-qb", "side")
    aside = commit(tmp_path, "code/side.py", "1")
    git(tmp_path, "checkout", "-q", "main")
    second = commit(tmp_path, "code/slow.py", "2")
    stamp = "2026-01-01; a machine; commit "
    text = "".join(
        (
            section("fast", stamp + second),
            section("slow --parts a", stamp + f"{first}+"),
            section("gone", stamp + "0123456"),
            section("side", stamp + aside),
            section("bare", ""),
            section("other", stamp + second),
        )
    )
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "some.md").write_text(text)
    (tmp_path / "bench" / "RESULTS.md").write_text(RESULTS)
    return tmp_path


def test_lists_claims_of_older_code_and_of_no_commit(root: Path) -> None:
    measured = dict.fromkeys(("fast", "slow", "gone", "side", "bare"), ("code",))
    found = {(one.claim.text, one.claim.anchor): one for one in findings(root, measured)}
    assert [key[0] for key in found] == ["old", "forged", "elsewhere", "unstamped", "unlisted", "nowhere"]
    assert {text for (text, _), one in found.items() if one.gone} == {"forged", "elsewhere", "unstamped", "nowhere"}
    assert found["old", "slow---parts-a"].why.startswith("1 changes of the code that it measures since ")
    assert "not in the history" in found["elsewhere", "side"].why
    assert "nobody has said which code other measures" in found["unlisted", "other"].why


def test_a_change_of_other_code_is_none(root: Path) -> None:
    assert [one.claim.text for one in findings(root, {"fast": ("code",), "slow": ("docs",)})][:1] != ["old"]


def test_claims_follow_same_and_skip_headings() -> None:
    rows = claims(RESULTS)
    assert [(row.text, row.anchor) for row in rows[:4]] == [
        ("fresh", "fast"),
        ("the same", "fast"),
        ("old", "slow---parts-a"),
        ("old", "fast"),
    ]
    assert "explained" not in {row.text for row in rows}


def test_a_part_of_a_section_has_its_stamp() -> None:
    text = section("whole", "2026-01-01; a; commit 1234567") + "### A part, later\n\nwords\n\n"
    text += "### Another\n\n2026-01-02; a; commits 7654321+, 89abcde\n"
    found = runs(text)
    assert found["a-part-later"].commits == ("1234567",)
    assert found["another"].commits == ("7654321", "89abcde")
    assert {run.figure for run in found.values()} == {"whole"}
    assert anchor_of("10,000 requests as in the paper") == "10000-requests-as-in-the-paper"


def test_every_path_that_is_measured_exists() -> None:
    assert [path for paths in MEASURED.values() for path in paths if not (ROOT / path).exists()] == []


def test_every_claim_has_a_section() -> None:
    folder = ROOT / "bench"
    sections = {path.name: runs(path.read_text()) for path in (folder / "results").glob("*.md")}
    rows = claims((folder / "RESULTS.md").read_text())
    assert len(rows) > 50
    assert [row for row in rows if row.anchor not in sections.get(row.file, {})] == []


def test_a_budget_is_judged_by_the_lowest_of_some_pairs() -> None:
    told = iter((1.3, 1.04, 9.0))
    assert judged(Budget("a", (), 1.0), lambda words: next(told)) == Verdict("ok", 1.04)
    assert next(told) == 9.0


def test_a_change_that_makes_it_slower_by_a_tenth_oversteps() -> None:
    asked: list[Sequence[str]] = []

    def slower(words: Sequence[str]) -> float:
        asked.append(words)
        return 1.1

    assert judged(Budget("a", ("x",), 1.0), slower) == Verdict("SLOWER", 1.1)
    assert asked == [("x",)] * PAIRS_MAX


def test_a_budget_far_above_the_cost_is_to_be_set_anew() -> None:
    assert judged(Budget("a", (), 1.0), lambda words: 0.9).word == "lower"
    assert judged(Budget("a", (), 1.0), lambda words: 0.98).word == "ok"


def test_budgets_name_different_rows() -> None:
    assert len({budget.words for budget in BUDGETS}) == len(BUDGETS)


@pytest.mark.parametrize(("share", "word"), [(1.0, "ok"), (1.02, "ok"), (1.04, "SLOWER"), (0.96, "lower")])
def test_a_budget_is_judged_by_one_count_of_instructions(share: float, word: str) -> None:
    asked: list[Sequence[str]] = []

    def measure(words: Sequence[str]) -> float:
        asked.append(words)
        return 0.5 * share

    assert judged_by_count(Budget("a", ("x",), 0.5), measure) == Verdict(word, 0.5 * share)
    assert asked == [("x", *COUNTED)]


def test_code_of_a_commit_that_is_gone_is_refused() -> None:
    with pytest.raises(EarlierCodeError), checked_out("0123456"):
        pass


def test_timers_of_the_rigs_loop_fire_by_its_requests() -> None:
    clock = RequestClock()
    fired: list[int] = []

    async def requests() -> list[int]:
        asyncio.get_running_loop().call_later(1.5, fired.append, 0)
        counts = []
        for _ in range(3):
            clock.advance(SECOND_NS)
            for _ in range(2):
                await asyncio.sleep(0)
            counts.append(len(fired))
        return counts

    assert run_by(requests(), clock) == [0, 1, 1]


def test_a_count_is_what_callgrind_totals(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("events: Ir\nfn=(1)\n3 12\n\ntotals: 4711\n")
    assert total(tmp_path / "counts") == 4711
