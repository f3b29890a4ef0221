"""Orders of roles at the command line: answers, and what `millrace status` tells while one waits."""

from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from millrace.cli.cluster_view import ClusterView
from millrace.cli.errors import CliError
from millrace.cli.role import taken
from millrace.cli.status_table import cluster_tables
from millrace.contracts.coordinator import OrderAccepted, OrderRefusal, OrderRefused
from millrace.contracts.message import Body
from millrace.contracts.plan import InstanceRole, Plan, Stage
from rich.console import Console

T0 = 1_700_000_000_000_000_000
BOTH, PREFILL, DECODE = InstanceRole
STAGE = Stage(name="s0", length_min=0, length_max=None, instances=["w0", "w1"])


def test_the_answer_to_an_order_is_told_or_refused() -> None:
    assert taken(OrderAccepted(detail="w1 will be decode")) == "w1 will be decode"
    refused = OrderRefused(reason=OrderRefusal.OLD_PLAN, detail="made on plan 3; 4 is in force")
    answers: tuple[tuple[Body | str, str], ...] = (
        (refused, "old_plan.*made on plan 3"),
        ("nobody listens", "no coordinator takes the order: nobody listens"),
        (Plan(model="m", epoch=1, stages=[STAGE], coordinator="c"), "Plan/1 is no answer"),
    )
    for answer, words in answers:
        with pytest.raises(CliError, match=words):
            taken(answer)


def test_the_status_tells_an_order_until_the_plan_has_it() -> None:
    view = ClusterView()

    def plan(epoch: int, role: InstanceRole) -> str:
        stage = msgspec.structs.replace(STAGE, roles={"w1": role})
        orders = {"w1": DECODE, "gone": PREFILL}
        body = Plan(model="m", epoch=epoch, stages=[stage], coordinator="c", role_orders=orders)
        view.hear(body, T0)
        written = StringIO()
        Console(width=120, file=written).print(cluster_tables("c", view, T0, width=120))
        return written.getvalue()

    assert "w1 does both, ordered to decode" in plan(1, BOTH)
    assert "ordered" not in plan(2, DECODE)
