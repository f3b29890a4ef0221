"""Results are what their JSON says: pages are as they would be written, and each figure has a bench that exists."""

from collections import Counter

from bench.measured import MEASURED
from bench.results_pages import ROOT, Area, area_files, pages, read_area
from tests.tidy.test_docs import benches

#: Figures that matter, on one page.
MATTER_MAX = 40
BENCH = "python -m bench"

AREAS: dict[str, Area] = {str(path.relative_to(ROOT)): read_area(path) for path in area_files()}


def test_pages_are_as_they_would_be_written() -> None:
    stale = [str(path) for path, text in pages().items() if (ROOT / path).read_text() != text]
    assert not stale, f"run `python -m bench --pages`, which writes {', '.join(stale)}"


def test_every_figure_and_run_is_of_a_bench_that_exists() -> None:
    figures = [figure for area in AREAS.values() for figure in area.figures]
    assert len(figures) > 100
    by_bench = {
        figure.bench for figure in figures if (figure.origin.command or "python -m bench").startswith("python -m bench")
    }
    by_run = {run.title.split()[0].rstrip(":") for area in AREAS.values() for run in area.runs}
    retired = {each.bench for each in figures if each.retired}
    assert (by_bench | by_run) - benches() == retired


def test_the_code_that_a_figure_measures_is_named() -> None:
    figures = [figure for area in AREAS.values() for figure in area.figures if not figure.retired]
    assert {each.bench for each in figures if (each.origin.command or BENCH).startswith(BENCH)} - set(MEASURED) == set()


def test_no_figure_stands_twice_and_one_page_holds_those_that_matter() -> None:
    claims = Counter((name, figure.claim) for name, area in AREAS.items() for figure in area.figures)
    assert [claim for claim, count in claims.items() if count > 1] == []
    assert 0 < sum(figure.matters for area in AREAS.values() for figure in area.figures) <= MATTER_MAX
