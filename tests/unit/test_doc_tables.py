"""Tables of docs: METRICS says what the services count, MIGRATION has a row for each family that is moved."""

import json
import re

import pytest
from prometheus_client.metrics_core import Metric

from tests.testbed import moving_families
from tests.unit.metrics_table import FILE, SECTIONS, families, table

ALL = [family for _, register in SECTIONS for family in families(register)]


def test_the_published_table_is_that_of_the_code() -> None:
    assert FILE.read_text("utf-8") == table(), "run `python -m tests.unit.metrics_table`"


@pytest.mark.parametrize("family", [f for f in ALL if not f.name.startswith("vllm:")], ids=lambda family: family.name)
def test_a_metric_has_a_plain_name_a_meaning_and_its_unit(family: Metric) -> None:
    assert re.fullmatch(r"millrace_[a-z0-9]+(_[a-z0-9]+)*", family.name)
    assert family.documentation
    if family.type == "histogram":
        assert family.name.endswith(("_seconds", "_ratio", "_rank"))


def test_no_two_metrics_have_one_name() -> None:
    names = [family.name for family in ALL]
    assert len(names) == len(set(names))


def test_the_table_of_families_is_that_of_the_suite() -> None:
    assert json.loads(moving_families.PASSED.read_text()).keys() <= moving_families.FAMILIES.keys()
    assert moving_families.table_in_page() == moving_families.table()
