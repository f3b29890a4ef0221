"""docs/MIGRATION.md has a row for each family that the suite of families starts and moves, and no other."""

from __future__ import annotations

from pathlib import Path

from tests.testbed.moving_families import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "MIGRATION.md"


def test_the_table_of_families_is_that_of_the_suite() -> None:
    section = PAGE.read_text().split("## Families of models")[1].split("\n## ")[0]
    rows = section.split("| family | layers keep |\n|---|---|\n")[1].split("\n\n")[0].strip().splitlines()
    assert rows == [f"| {name} | {family.keeps} |" for name, family in FAMILIES.items()]
