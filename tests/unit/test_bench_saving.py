"""A figure that is saved takes the place of its own run before, and of nothing else."""

from __future__ import annotations

import pytest

from bench.saving import ELSEWHERE, command_of, file_of, saved, section_of

BEFORE = """# Results

## gap

2026-11-21; AMD EPYC, 2 cores; Python 3.11.7; commit 1234567+

```
old figures
## gap
```

What the old figures say.

### With more load

```
others
```

## gap --own-pace

2026-11-21; AMD EPYC, 2 cores; Python 3.11.7; commit 1234567

```
its own
```
"""


def save(text: str, title: str, output: str = "new figures\n") -> str:
    return saved(text, title=title, command=f"python -m bench {title}", stamp="2026-12-01; here", output=output)


def test_a_run_replaces_the_run_before() -> None:
    after = save(BEFORE, "gap")
    assert "```\nold figures" not in after
    assert "## gap\n\n`python -m bench gap`\n\n2026-12-01; here\n\n```\nnew figures\n```\n" in after
    assert after.count("\n## gap\n") == 1


def test_words_about_the_run_before_stay_and_say_which_it_was() -> None:
    after = save(BEFORE, "gap")
    note = "(Written about the run of 2026-11-21, commit 1234567+; not yet read against the figures above.)"
    assert f"{note}\n\nWhat the old figures say.\n\n### With more load\n\n```\nothers\n```\n" in after


def test_saving_again_does_not_say_it_twice() -> None:
    once = save(BEFORE, "gap")
    assert save(once, "gap", "newer figures").count("Written about") == 1
    assert save(once, "gap") == once


def test_other_sections_are_as_they_were() -> None:
    after = save(BEFORE, "gap")
    assert after[after.index("## gap --own-pace") :] == BEFORE[BEFORE.index("## gap --own-pace") :]
    other = save(BEFORE, "gap --own-pace")
    assert other[: other.index("## gap --own-pace")] == BEFORE[: BEFORE.index("## gap --own-pace")]
    assert "its own" not in other


def test_a_figure_that_is_new_comes_at_the_end() -> None:
    after = save(BEFORE, "way")
    assert after.startswith(BEFORE)
    assert after.endswith("## way\n\n`python -m bench way`\n\n2026-12-01; here\n\n```\nnew figures\n```\n")
    assert save("", "way").startswith("## way\n")


def test_what_a_table_prints_is_no_heading() -> None:
    table = "# Results\n\n## gap\n\n```\n## way\n```\n"
    assert save(table, "way") == f"{table}\n{save('', 'way')}"


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ([], "gap"),
        (["--seed", "3"], "gap"),
        (["--own-pace", "--recordings", "/somewhere/of/mine"], "gap --own-pace"),
        (["--rates", "42", "--parts", "noise", "age", "--seeds", "3"], "gap --parts noise age"),
    ],
)
def test_arguments_that_make_another_figure_are_in_its_heading(words: list[str], title: str) -> None:
    assert section_of("gap", words) == title


def test_the_command_is_told_without_places_of_the_machine() -> None:
    assert command_of("gap", ["--recordings", "/somewhere/of/mine", "--seed", "3"]) == (
        "python -m bench gap --recordings FILE --seed 3"
    )


@pytest.mark.parametrize(
    ("title", "file"),
    [
        ("gap", "gaps.md"),
        ("gap --own-pace", "gaps.md"),
        ("gap --parts age", "gaps.md"),
        ("ways", "ways.md"),
        ("way", ELSEWHERE),
    ],
)
def test_a_section_is_found_where_it_or_one_of_the_same_figure_is(title: str, file: str) -> None:
    assert file_of(title, {"gaps.md": BEFORE, "ways.md": "# Ways\n\n## ways\n"}) == file
