"""`millrace scale`: numbers and changes, and the instances that they count."""

from __future__ import annotations

import pytest
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.errors import CliError
from millrace.cli.scale import wanted

ROWS = [
    InstanceRow(instance="w0", model="m", stage="s0", state="ready", role="prefill", shape="cpu"),
    InstanceRow(instance="w1", model="m", stage="s0", state="ready", role="decode", shape="h100x2"),
    InstanceRow(instance="w2", model="m", stage="s0", state="ready", role="decode", shape="cpu"),
    InstanceRow(instance="w3", model="m", stage="s0", state="draining", role="decode", shape="cpu"),
]


def test_a_number_is_what_it_says_and_a_change_counts_those_that_are_meant() -> None:
    assert wanted("5", ROWS) == 5
    assert wanted("+1", ROWS) == 4
    assert wanted("-1", ROWS, role="decode") == 1
    assert wanted("+2", ROWS, shape="cpu", role="decode") == 3


def test_anything_else_is_refused() -> None:
    with pytest.raises(CliError, match="COUNT 'many'"):
        wanted("many", ROWS)
