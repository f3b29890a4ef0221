"""View of the cluster that status and top make of heard messages."""

import io

import msgspec
import pytest
from millrace.cli.cluster_rows import InstanceRow
from millrace.cli.cluster_view import GONE_NS, SILENT_NS, SUSPECT_NS, ClusterView
from millrace.cli.status_table import cluster_tables
from millrace.contracts.broker import BoundaryMoved
from millrace.contracts.kv import CopierKind, KvEndpoint
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.contracts.status import (
    DrainedInstance,
    InstanceMigrations,
    InstanceRecord,
    InstanceSummary,
    MigrationStatus,
    PresenceState,
    ServicePresence,
)
from rich.console import Console

from tests.testbed.messages import plain, plain_record, plain_summary

S = 1_000_000_000
T0 = 1_700_000_000 * S


def summary(instance: str = "w0", *, at: int = T0, tokens: int = 0, **changes: object) -> InstanceSummary:
    counts = {"running": 2, "waiting": 1, "running_tokens": 100, "blocks_free": 30, "output_tokens_total": tokens}
    return plain_summary(instance, **{"incarnation": T0 - 60 * S, "model": "tiny", "at_ns": at, **counts, **changes})


def presence(role: str, name: str, state: PresenceState = PresenceState.ALIVE, **changes: object) -> ServicePresence:
    fields: dict[str, object] = {"role": role, "name": name, "incarnation": T0 - 60 * S, "at_ns": T0, "state": state}
    return ServicePresence(**(fields | changes))  # type: ignore[arg-type]


def record(instance: str) -> InstanceRecord:
    return plain_record(instance, incarnation=T0 - S, model="tiny")


def only(view: ClusterView, now: int = T0) -> InstanceRow:
    (row,) = view.instances(now)
    return row


@pytest.fixture
def view() -> ClusterView:
    return ClusterView()


def test_tokens_per_second_are_those_between_two_summaries_of_the_last_two_seconds(view: ClusterView) -> None:
    rates = []
    for quarter in range(40):  # 400 tok/s for five seconds, then nothing
        at_ns = T0 + quarter * S // 4
        view.hear(summary(at=at_ns, tokens=100 * min(quarter, 20)), at_ns)
        rates.append(only(view, at_ns).output_tokens_per_s)
    assert rates[:2] == [None, 400.0]
    assert rates[-1] == 0.0


def test_a_restarted_worker_counts_anew(view: ClusterView) -> None:
    view.hear(summary(at=T0, tokens=90_000), T0)
    view.hear(summary(at=T0 + S, tokens=5, incarnation=T0 + S // 2), T0 + S)
    assert only(view, T0 + S).output_tokens_per_s is None
    assert only(view, T0 + S).uptime_s == 0.5


def test_an_instance_without_a_heartbeat_is_suspect_and_later_gone(view: ClusterView) -> None:
    view.hear(summary(), T0)
    assert only(view, T0 + SUSPECT_NS).state == "ready"
    assert only(view, T0 + SUSPECT_NS + 1).state == "suspect"
    assert view.instances(T0 + GONE_NS + 1) == []


def test_the_supervisor_s_word_that_a_worker_is_dead_counts_for_that_incarnation_only(view: ClusterView) -> None:
    view.hear(summary(), T0)
    view.hear(presence("worker", "w0", PresenceState.DEAD, incarnation=0, at_ns=T0 + 1), T0 + 1)
    assert only(view, T0 + 1).state == "dead"
    view.hear(summary(incarnation=T0 + S, at=T0 + S), T0 + S)
    assert only(view, T0 + S).state == "ready"


def test_a_registered_instance_that_says_nothing_yet_is_starting(view: ClusterView) -> None:
    view.hear_stored("instance", [record("w3")], T0)
    assert (only(view).state, only(view).blocks_total) == ("starting", 100)
    view.hear_stored("instance", [], T0)
    assert view.instances(T0) == []


def test_how_kv_moves_and_which_role_an_instance_has_are_told(view: ClusterView) -> None:
    view.hear(summary(), T0)
    assert (only(view).role, only(view).kv) == ("both", [])
    kv = KvEndpoint(
        fingerprint="f", block_tokens=16, block_bytes=1, blocks=9, copiers=[CopierKind.SHARED_MEMORY, CopierKind.NIXL]
    )
    view.hear_stored("instance", [msgspec.structs.replace(record("w0"), kv=kv)], T0)
    roles = {"w0": InstanceRole.PREFILL}
    stages = [Stage(name="s1", length_min=0, length_max=None, instances=["w0"], roles=roles)]
    view.hear_stored("plan", [Plan(model="tiny", epoch=1, stages=stages, coordinator="c")], T0)
    assert (only(view).role, only(view).kv) == ("prefill", ["shared_memory", "nixl"])
    text = drawn(view)
    assert "prefill" in text
    assert "shared_memory, 1 other" in text


def test_an_instance_that_moves_nothing_says_why(view: ClusterView) -> None:
    why = "its KV cache has several groups; its layers keep other state than full attention"
    for name in ("w0", "w1"):
        view.hear(summary(name), T0)
    view.hear_stored("instance", [msgspec.structs.replace(record(name), kv_refusal=why) for name in ("w0", "w1")], T0)
    assert f"no KV moves from or to w0, w1: {why}" in " ".join(drawn(view).split())


def test_services_are_alive_then_silent_and_their_trouble_is_shown(view: ClusterView) -> None:
    trouble = "m is answered with 503"
    view.hear(presence("ingress", "ingress-0", url="http://127.0.0.1:8000", trouble=trouble), T0)
    view.hear(presence("worker", "w0"), T0)
    assert f"ingress-0: {trouble}" in drawn(view)
    (row,) = view.services(T0 + S)
    assert (row.role, row.state, row.url) == ("ingress", "alive", "http://127.0.0.1:8000")
    (row,) = view.services(T0 + 4 * S)
    assert row.state == "silent"


def test_instances_stand_in_the_order_a_person_counts_and_totals_leave_out_the_dead(view: ClusterView) -> None:
    for name in ("w10", "w2"):
        view.hear(summary(name), T0)
    view.hear(presence("worker", "w10", PresenceState.DEAD, at_ns=T0 + 1), T0)
    assert [row.instance for row in view.instances(T0)] == ["w2", "w10"]
    totals = view.totals(view.instances(T0))
    assert (totals.instances, totals.instances_ready, totals.running, totals.blocks_used) == (2, 1, 2, 70)


def drawn(view: ClusterView, *, rows_max: int = 0, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(cluster_tables("local", view, T0, rows_max=rows_max, width=width))
    return console.export_text()


def test_a_small_screen_shows_the_busiest_and_counts_the_rest(view: ClusterView) -> None:
    for index in range(20):
        view.hear(summary(f"w{index}", running=index), T0)
    text = drawn(view, rows_max=5)
    assert "15 more instances" in text
    assert "w19" in text
    assert "w0 " not in text


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_nothing_is_cut_off_at_any_width(view: ClusterView, width: int) -> None:
    for index in range(12):
        view.hear(summary(f"worker-{index}", model="a-model-with-a-long-name", blocks_total=262_144), T0)
    text = drawn(view, width=width, rows_max=5)
    assert "…" not in text
    assert "running" in text
    assert ("a-model-with-a-long-name" in text) == (width >= 100)
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("worker-")]
    assert shown == [f"worker-{index}" for index in range(5)]


# migrations under way


def migration(sequence: str = "r1.0", *, began: int = T0 - S, **changes: object) -> MigrationStatus:
    fields: dict[str, object] = {"source": "w0", "target": "w1", "step": "pulling", "round": 2, "bytes": 3_500_000}
    return MigrationStatus(sequence=sequence, began_ns=began, **(fields | changes))  # type: ignore[arg-type]


def moving(*rows: InstanceMigrations, migrations: list[MigrationStatus], name: str = "migrator-0") -> ServicePresence:
    return presence("migrator", name, moving=list(rows), migrations=migrations)


def two_that_move() -> ClusterView:
    """w0 sends a sequence to w1 and looks for a place for another one."""
    view = ClusterView()
    for name in ("w0", "w1", "w2"):
        view.hear(summary(name), T0)
    told = [migration("r2.0", step="leasing", target=""), migration("r1.0", began=T0 - 3 * S)]
    view.hear(moving(InstanceMigrations("w0", 2), migrations=told), T0)
    return view


def test_migrations_are_told_oldest_first_and_grow_older_while_nothing_is_heard() -> None:
    rows = two_that_move().migrations(T0 + S // 2)
    assert [(row.sequence, row.age_s) for row in rows] == [("r1.0", 3.5), ("r2.0", 1.5)]
    first = rows[0]
    assert (first.source, first.target, first.step, first.round, first.bytes) == ("w0", "w1", "pulling", 2, 3_500_000)


def test_what_a_migrator_said_counts_until_it_says_something_else_leaves_or_falls_silent() -> None:
    view = two_that_move()
    assert not view.migrations(T0 + SILENT_NS + 1)
    view.hear(moving(migrations=[]), T0 + S)
    assert not view.migrations(T0 + S)
    assert [row.leaving for row in view.instances(T0 + S)] == [0, 0, 0]
    view = two_that_move()
    view.hear(presence("migrator", "migrator-0", PresenceState.LEAVING), T0 + S)
    assert not view.migrations(T0 + S)


def test_the_tables_show_what_moves_and_only_where_something_does() -> None:
    text = drawn(two_that_move())
    assert "moving 2" in text
    assert "2 out" in text
    assert "1 in" in text
    (line,) = [line for line in text.splitlines() if line.startswith("r1.0")]
    assert line.split() == ["r1.0", "w0", "w1", "pulling", "2", "3.3", "MiB", "3.0s"]
    (line,) = [line for line in text.splitlines() if line.startswith("r2.0")]
    assert line.split()[2] == "?"
    still = ClusterView()
    still.hear(summary(), T0)
    still.hear(moving(migrations=[]), T0)
    assert "moving" not in drawn(still)
    assert "migration " not in drawn(still)


def test_what_an_operator_drained_stays_in_sight_until_it_is_started_again(view: ClusterView) -> None:
    view.hear(summary("w0"), T0)
    view.hear(presence("worker", "w0", PresenceState.DEAD, at_ns=T0), T0)
    view.hear(presence("supervisor", "s", drained=[DrainedInstance("w0", "m"), DrainedInstance("w1", "m")]), T0)
    rows = [(row.instance, row.model, row.state) for row in view.instances(T0)]
    assert rows == [("w0", "m", "drained"), ("w1", "m", "drained")]
    assert drawn(view).splitlines()[3].split() == ["w1", "m", "-", "drained", "0", "0", "-", "-", "0", "-", "-"]
    view.hear(presence("supervisor", "s", drained=[]), T0)
    assert [(row.instance, row.state) for row in view.instances(T0)] == [("w0", "dead")]


def staged() -> ClusterView:
    """Two stages that meet at 720 tokens: w0 below, w1 and w2 above."""
    stages = [
        Stage(name="s0", length_min=0, length_max=720, instances=["w0"]),
        Stage(name="s1", length_min=720, length_max=None, instances=["w1", "w2"]),
    ]
    view = ClusterView()
    view.hear(Plan(model="tiny", epoch=3, boundary_epoch=2, stages=stages, coordinator="c"), T0)
    return view


def moved_boundary(length: int, plan_epoch: int) -> BoundaryMoved:
    return plain(BoundaryMoved, model="tiny", length=length, plan_epoch=plan_epoch, keeper="w0", at_ns=T0)


def test_instances_stand_by_stage_and_stages_sum_up_theirs() -> None:
    view = staged()
    for name in ("w2", "w0", "w1"):
        view.hear(summary(name), T0)
    view.hear(moving(InstanceMigrations("w0", 2), migrations=[migration(), migration()]), T0)
    rows = view.instances(T0)
    assert [row.instance for row in rows] == ["w0", "w1", "w2"]
    low, high = view.stages(rows)
    assert (low.stage, low.length_min, low.length_max) == ("s0", 0, 720)
    assert (low.instances, low.running, low.leaving) == (1, 2, 2)
    assert (high.length_min, high.length_max, high.running, high.waiting, high.arriving) == (720, None, 4, 2, 2)
    assert (high.blocks_used, high.blocks_total) == (140, 200)
    shown = drawn(view)
    assert "0 to 719" in shown
    assert "720 and up" in shown
    assert shown.index("720 and up") < shown.index("w0")


def test_a_stage_ends_where_its_boundary_was_moved_to_within_this_plan() -> None:
    view = staged()
    view.hear(moved_boundary(650, 2), T0)
    assert [(row.length_min, row.length_max) for row in view.stages([])] == [(0, 650), (650, None)]
    view.hear(moved_boundary(300, 1), T0)
    assert [(row.length_min, row.length_max) for row in view.stages([])] == [(0, 720), (720, None)]
