"""The ladder in `millrace status`: the rung that acts, flips, and silence."""

from __future__ import annotations

from io import StringIO

import msgspec
from millrace.cli.cluster_view import SILENT_NS, ClusterView
from millrace.cli.status_table import cluster_tables, ladder_line
from millrace.contracts.coordinator import LadderReported
from millrace.contracts.plan import InstanceRole
from rich.console import Console

T0 = 1_700_000_000_000_000_000
TOLD = LadderReported(
    model="tiny",
    coordinator="coordinator-0",
    at_ns=T0,
    policy="pressure",
    rung="flip",
    flipping={"w1": InstanceRole.DECODE},
    flips=3,
    last="w1 from prefill to decode: decode at 1.20",
)


def test_the_line_tells_the_rung_the_flips_and_the_last_one() -> None:
    assert ladder_line(TOLD) == (
        "tiny: flip acts; roles pressure; 3 flips; w1 on its way to decode; "
        "last: w1 from prefill to decode: decode at 1.20"
    )


def test_fixed_roles_without_flips_need_no_line() -> None:
    fixed = msgspec.structs.replace(TOLD, policy="fixed", flips=0, flipping={}, last="")
    assert ladder_line(fixed) == ""
    assert ladder_line(msgspec.structs.replace(fixed, flips=1))


def test_the_status_shows_it_until_the_coordinator_is_silent() -> None:
    view = ClusterView()
    view.hear(TOLD, T0)
    assert view.ladders(T0 + SILENT_NS) == [TOLD]
    assert view.ladders(T0 + SILENT_NS + 1) == []
    written = StringIO()
    console = Console(width=120, file=written)
    console.print(cluster_tables("c", view, T0, width=120))
    assert "tiny: flip acts" in written.getvalue()
