"""docs/MIGRATION.md has a row for each family that the suite of families moves, with what it noted."""

import json

from tests.testbed.moving_families import FAMILIES, PASSED, table, table_in_page


def test_the_table_of_families_is_that_of_the_suite() -> None:
    assert json.loads(PASSED.read_text()).keys() <= FAMILIES.keys()
    assert table_in_page() == table()
