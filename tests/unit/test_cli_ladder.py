"""The ladder in `millrace status`: the rung that acts, flips, and silence."""

from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from millrace.cli.cluster_view import SILENT_NS, ClusterView
from millrace.cli.errors import CliError
from millrace.cli.flipping import progress, taken
from millrace.cli.status_table import cluster_tables, ladder_line
from millrace.contracts.coordinator import LadderReported, OrderAccepted, OrderRefusal, OrderRefused, SetRole
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


def test_the_load_is_told_with_the_reason_where_it_is_not_normal() -> None:
    told = {"scenario": "imbalanced", "reason": "prefill at 4.52, decode at 0.26 of their objectives, not for 5 s yet"}
    line = ladder_line(msgspec.structs.replace(TOLD, rung="move", flipping={}, last="", **told))
    assert line == (
        "tiny: move acts; load imbalanced (prefill at 4.52, decode at 0.26 of their objectives, not for 5 s yet); "
        "roles pressure; 3 flips"
    )
    normal = ladder_line(msgspec.structs.replace(TOLD, flipping={}, last="", scenario="normal", reason="prefill at 0"))
    assert normal == "tiny: flip acts; load normal; roles pressure; 3 flips"


def test_fixed_roles_without_flips_need_no_line() -> None:
    fixed = msgspec.structs.replace(TOLD, policy="fixed", flips=0, flipping={}, last="")
    assert ladder_line(fixed) == ""
    assert ladder_line(msgspec.structs.replace(fixed, flips=1))


def test_one_flip_is_told_in_the_singular() -> None:
    assert "; 1 flip; " in ladder_line(msgspec.structs.replace(TOLD, flips=1))


def test_instances_whose_decodes_come_first_are_told_with_their_step() -> None:
    line = ladder_line(msgspec.structs.replace(TOLD, rung="priority", step_budgets={"w1": 640}, last="", flipping={}))
    assert line == "tiny: priority acts; roles pressure; 3 flips; decodes first at w1, 640 tokens a step"


def test_orders_that_wait_are_told_with_what_holds_them() -> None:
    waits = msgspec.structs.replace(
        TOLD,
        policy="fixed",
        flips=2,
        flips_given_up=1,
        flipping={},
        ordered={"w0": InstanceRole.PREFILL},
        held="w0 was flipped 4 s ago; 6 s to wait",
        last="",
    )
    assert ladder_line(waits) == (
        "tiny: flip acts; roles fixed; 2 flips (1 given up); w0 ordered to prefill, waits: "
        "w0 was flipped 4 s ago; 6 s to wait"
    )


def test_the_answer_to_an_order_is_told_or_refused() -> None:
    order = SetRole(model="tiny", instance="w1", role=InstanceRole.DECODE)
    assert taken(OrderAccepted(detail="w1 will be decode")) == "w1 will be decode"
    for answer, words in (
        (
            OrderRefused(reason=OrderRefusal.OLD_PLAN, detail="made on plan 3; 4 is in force"),
            "old_plan.*made on plan 3",
        ),
        ("nobody listens", "no coordinator takes the order: nobody listens"),
        (TOLD, "LadderReported/1 is no answer"),
    ):
        with pytest.raises(CliError, match=words):
            taken(answer)
    assert progress(TOLD, order, "both") == "w1 does both, on its way to decode"
    ordered = msgspec.structs.replace(TOLD, flipping={}, ordered={"w1": InstanceRole.DECODE}, held="scaled 3 s ago")
    assert progress(ordered, order, "prefill") == "w1 does prefill; the order waits: scaled 3 s ago"
    assert progress(msgspec.structs.replace(TOLD, flipping={}), order, "decode") == "w1 does decode"


def test_the_status_shows_it_until_the_coordinator_is_silent() -> None:
    view = ClusterView()
    view.hear(TOLD, T0)
    assert view.ladders(T0 + SILENT_NS) == [TOLD]
    assert view.ladders(T0 + SILENT_NS + 1) == []
    written = StringIO()
    console = Console(width=120, file=written)
    console.print(cluster_tables("c", view, T0, width=120))
    assert "tiny: flip acts" in written.getvalue()
