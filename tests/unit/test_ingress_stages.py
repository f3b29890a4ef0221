"""Stages and roles as ingress sees them: order by distance, spill when full, refined boundaries, who prefills."""

import pytest
from millrace.contracts.broker import BoundaryMoved
from millrace.contracts.local import KeyChanged
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.policies.dispatch.view import InstanceView

from services.ingress.cluster.cluster_view import IngressClusterView
from services.ingress.cluster.instances import StageCandidates
from services.ingress.cluster.stage_routing import first_with_room
from tests.testbed.messages import plain
from tests.unit.ingress_core import MODEL, Bench, chunk, instance_of

CUTS = (0, 100, 1000, None)


def plan(epoch: int = 5, boundary_epoch: int = 3, cuts: tuple[int | None, ...] = CUTS) -> Plan:
    stages = [
        Stage(name=f"s{k}", length_min=cuts[k] or 0, length_max=cuts[k + 1], instances=[f"w{k}"])
        for k in range(len(cuts) - 1)
    ]
    return Plan(model="m", epoch=epoch, stages=stages, coordinator="c", boundary_epoch=boundary_epoch)


def moved(length: int, *, stage: int = 0, epoch: int = 5, version: int = 1) -> BoundaryMoved:
    cut = {"stage": f"s{stage}", "next_stage": f"s{stage + 1}", "length": length, "keeper": "w1"}
    return plain(BoundaryMoved, plan_epoch=epoch, version=version, **cut)


def view(first: Plan) -> IngressClusterView:
    cluster = IngressClusterView()
    cluster.take_plan("m", first)
    return cluster


def first_stage(cluster: IngressClusterView, length: int) -> str:
    return cluster.stages("m", length)[0].name


@pytest.mark.parametrize(
    ("length", "order"), [(5, "s0 s1 s2"), (100, "s1 s2 s0"), (999, "s1 s2 s0"), (5000, "s2 s1 s0")]
)
def test_stages_come_by_distance(length: int, order: str) -> None:
    assert " ".join(s.name for s in view(plan()).stages("m", length)) == order


def test_a_refined_boundary_replaces_the_plans_unless_it_is_older() -> None:
    cluster = view(plan())
    cluster.take_boundary(moved(150))
    assert (first_stage(cluster, 149), first_stage(cluster, 150)) == ("s0", "s1")
    cluster.take_boundary(moved(90, version=4))
    cluster.take_boundary(moved(120, version=3))
    cluster.take_boundary(moved(130, version=4))
    assert (first_stage(cluster, 89), first_stage(cluster, 90)) == ("s0", "s1")


@pytest.mark.parametrize(
    "bad",
    [
        moved(150, epoch=2),  # of other cuts
        moved(150, epoch=6),  # of a plan that is not here yet
        moved(150, stage=2),  # nothing is above it
        moved(1000),  # not below the next cut
        moved(0),
        BoundaryMoved(
            model="other", stage="s0", next_stage="s1", length=150, plan_epoch=5, version=1, keeper="x", at_ns=1
        ),
        BoundaryMoved(model="m", stage="s0", next_stage="s2", length=150, plan_epoch=5, version=1, keeper="x", at_ns=1),
    ],
)
def test_a_boundary_that_does_not_fit_the_plan_changes_nothing(bad: BoundaryMoved) -> None:
    cluster = view(plan())
    cluster.take_boundary(bad)
    assert (first_stage(cluster, 99), first_stage(cluster, 100)) == ("s0", "s1")


def test_a_boundary_outlives_a_change_of_membership_and_not_a_change_of_the_cuts() -> None:
    cluster = view(plan(epoch=5))
    cluster.take_boundary(moved(150))
    cluster.take_plan("m", plan(epoch=6))
    assert first_stage(cluster, 149) == "s0"
    cluster.take_plan("m", plan(epoch=7, boundary_epoch=7, cuts=(0, 120, 1000, None)))
    assert (first_stage(cluster, 119), first_stage(cluster, 120)) == ("s0", "s1")


def listed(name: str, low: int, high: int | None, *, decodes: bool = False) -> StageCandidates:
    return StageCandidates(Stage(name=name, length_min=low, length_max=high, instances=[]), [], decodes=decodes)


def seen(name: str, used: int, *, waiting: int = 0, known: bool = True) -> InstanceView:
    return InstanceView(name=name, known=known, used_tokens=used, total_tokens=1000, waiting_prefill_tokens=waiting)


SHORT, LONG = listed("s0", 0, 100), listed("s1", 100, None)


@pytest.mark.parametrize(
    ("length", "found", "expected"),
    [
        (50, [(SHORT, (seen("a", 990), seen("b", 0))), (LONG, (seen("c", 0),))], "a b"),
        (50, [(SHORT, (seen("a", 990), seen("b", 100, waiting=900))), (LONG, (seen("c", 0),))], "c"),
        (50, [(SHORT, (seen("a", 990),)), (LONG, (seen("c", 999),))], "a"),  # all are full: it queues at its own
        (150, [(LONG, (seen("c", 990),)), (SHORT, (seen("a", 0),))], "c"),  # never to a shorter one for load
        (150, [(SHORT, (seen("a", 990),))], "a"),  # nobody else lives
        (50, [(SHORT, (seen("a", 990, known=False),)), (LONG, (seen("c", 0),))], "a"),
        (50, [], ""),
    ],
)
def test_a_full_stage_spills_to_the_next_longer(
    length: int, found: list[tuple[StageCandidates, tuple[InstanceView, ...]]], expected: str
) -> None:
    assert " ".join(each.name for each in first_with_room(found, length)) == expected


# Whoever prefills gets new and continued sequences; whoever decodes only when nobody else can.


def planned(**roles: InstanceRole) -> Bench:
    bench = Bench(instances=3)
    stage = Stage(name="s0", length_min=0, length_max=None, instances=["w0", "w1", "w2"], roles=roles)
    plan = Plan(model=MODEL, epoch=2, stages=[stage], coordinator="c0")
    bench.send(KeyChanged(bucket="plan", key=MODEL, value=plan, revision=2))
    return bench


def placements(bench: Bench, count: int) -> set[str]:
    for index in range(count):
        bench.run_call(f"r{index}")
    return {instance_of(request) for request in bench.submissions()}


def test_new_requests_go_where_prefills_are_done():
    bench = planned(w0=InstanceRole.PREFILL, w1=InstanceRole.DECODE)
    assert placements(bench, 8) == {"w0", "w2"}


def test_a_decode_instance_is_asked_when_no_other_is_usable():
    bench = planned(w0=InstanceRole.PREFILL, w1=InstanceRole.DECODE, w2=InstanceRole.DECODE)
    bench.die("w0", 0)
    assert placements(bench, 4) == {"w1", "w2"}
    assert bench.actor.state.cluster.usable(MODEL) == 2


def test_a_continuation_is_a_prefill():
    bench = planned(w1=InstanceRole.DECODE)
    instance = bench.run_call()
    bench.tokens(instance, chunk("abc"))
    bench.die(instance, 0)
    _, other = bench.last_submission()
    assert {instance, other} == {"w0", "w2"}
    bench.tokens(other, chunk("d", 3, epoch=1))
    bench.die(other, 0)
    assert bench.last_submission()[1] == "w1"
