"""Orders at the command line (`drain`, `scale`, `migrate`, `role`): whom they mean, and how answers are told."""

from io import StringIO
from typing import Any

import msgspec
import pytest
from millrace.cli.__main__ import main
from millrace.cli.apply import unsafe
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.cluster_view import ClusterView
from millrace.cli.drain import spare_the_last
from millrace.cli.errors import CliError
from millrace.cli.role import taken
from millrace.cli.scale import wanted
from millrace.cli.status_table import cluster_tables
from millrace.contracts.coordinator import OrderAccepted, OrderRefusal, OrderRefused
from millrace.contracts.message import Body
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.provisioner import ComparedProcess, ProcessChange
from rich.console import Console

T0 = 1_700_000_000_000_000_000
BOTH, PREFILL, DECODE = InstanceRole
STAGE = Stage(name="s0", length_min=0, length_max=None, instances=["w0", "w1"])


def row(instance: str, state: str = "ready", model: str = "m", **fields: Any) -> InstanceRow:
    return InstanceRow(instance=instance, model=model, stage="s0", state=state, running=2, waiting=1, **fields)


OTHERS = [row("w1", "draining"), row("w2", "drained"), row("w3", "dead"), row("v0", model="n")]
SHAPES = [
    row("w0", role="prefill", shape="cpu"),
    row("w1", role="decode", shape="h100x2"),
    row("w2", role="decode", shape="cpu"),
    row("w3", "draining", role="decode", shape="cpu"),
]


def test_the_last_ready_instance_of_a_model_is_not_drained_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = r"w0 is the last ready instance of m: its 3 requests have nowhere to go.*--force"
    with pytest.raises(CliError, match=refusal):
        spare_the_last([row("w0"), *OTHERS], row("w0"), force=False)
    spare_the_last([row("w0"), *OTHERS], row("w0"), force=True)
    assert "warning: w0 is the last ready instance of m" in capsys.readouterr().err
    spare_the_last([row("w0"), row("w9"), *OTHERS], row("w0"), force=False)
    spare_the_last([row("w0", "draining"), *OTHERS], row("w0", "draining"), force=False)
    assert capsys.readouterr().err == ""


def test_the_only_instance_here_changes_unasked_where_another_machine_or_a_spare_serves_its_model() -> None:
    row = ComparedProcess("w", "worker", ProcessChange.CHANGED, model="m", serves="m", instances=["w"])
    assert "only instance of m" in unsafe([row])
    assert unsafe([row], away={"m"}) == ""
    assert unsafe([row], spared={"w"}) == ""


def test_a_number_is_what_it_says_and_a_change_counts_those_that_are_meant() -> None:
    assert wanted("5", SHAPES) == 5
    assert wanted("+1", SHAPES) == 4
    assert wanted("-1", SHAPES, role="decode") == 1
    assert wanted("+2", SHAPES, shape="cpu", role="decode") == 3
    with pytest.raises(SystemExit, match="2"):  # wrong usage, before anybody is asked
        main(["scale", "m", "many"])


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
        view.hear(Plan(model="m", epoch=epoch, stages=[stage], coordinator="c", role_orders=orders), T0)
        written = StringIO()
        Console(width=120, file=written).print(cluster_tables("c", view, T0, width=120))
        return written.getvalue()

    assert "w1 does both, ordered to decode" in plan(1, BOTH)
    assert "ordered" not in plan(2, DECODE)
