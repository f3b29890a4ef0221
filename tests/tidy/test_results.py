"""Results keep to the benches: each section is of a figure that exists, is there once, and the index leads to it."""

import re
from pathlib import Path

from tests.tidy.test_docs import FENCE, LINK, anchors, benches, text_of
from tests.tidy.tree import tracked_files

FILES = [path for path in tracked_files() if path.match("bench/results/*.md")]
INDEX = Path("bench/RESULTS.md")
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)


def sections() -> list[tuple[str, str]]:
    """File and heading of each."""
    return [(path.name, title) for path in FILES for title in SECTION.findall(FENCE.sub("", text_of(path)))]


def test_every_section_is_headed_by_the_command_of_a_bench() -> None:
    assert len(sections()) > 20
    assert {title.partition(" ")[0] for _, title in sections()} - benches() == set()


def test_no_figure_stands_in_two_sections() -> None:
    titles = [title for _, title in sections()]
    assert sorted(titles) == sorted(set(titles))


def test_the_index_leads_to_every_section() -> None:
    linked = set(LINK.findall(text_of(INDEX)))
    wanted = {f"results/{name}#{anchor}" for name, title in sections() for anchor in anchors(f"## {title}\n")}
    assert wanted - linked == set()
