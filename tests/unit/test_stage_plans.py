"""Plans as messages, which stage serves a length, and which instance serves in which stage."""

import random

import msgspec
import pytest
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.policies.stages import StageShape, assign, stages_of


def stage(name: str, low: int, high: int | None, *instances: str, covered_by: str = "") -> Stage:
    return Stage(name=name, length_min=low, length_max=high, instances=list(instances), covered_by=covered_by)


def plan(*stages: Stage, epoch: int = 3, boundary_epoch: int = 0) -> Plan:
    return Plan(model="m", epoch=epoch, stages=list(stages), coordinator="c", boundary_epoch=boundary_epoch)


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ([], "stages is empty"),
        ([stage("s0", 1, None, "a")], "length_min 1 leaves a gap"),
        ([stage("s0", 0, 10, "a")], "length_max 10, but the last stage has no bound"),
        ([stage("s0", 0, 10, "a"), stage("s1", 12, None, "b")], "stage s1: length_min 12 leaves a gap"),
        ([stage("s0", 0, 10, "a"), stage("s1", 9, None, "b")], "stage s1: length_min 9 overlaps"),
        ([stage("s0", 0, None, "a"), stage("s1", 10, None, "b")], "stage s1: length_min 10 overlaps"),
        ([stage("s0", 0, 0, "a"), stage("s1", 0, None, "b")], "stage s0: length_max 0"),
        ([stage("s0", 0, 10, "a"), stage("s0", 10, None, "b")], "stages name s0 stands twice"),
        ([stage("s0", 0, 10, "a"), stage("s1", 10, None, "a")], "instance a stands twice"),
        ([stage("s0", 0, 10, "a"), stage("s1", 10, None)], "s1: instances is empty and covered_by names no stage"),
        ([stage("s0", 0, 10, "a"), stage("s1", 10, None, covered_by="s1")], "covered_by names s1"),
        ([stage("s0", 0, 10, "a"), stage("s1", 10, None, "b", covered_by="s0")], "but it has instances"),
    ],
)
def test_a_plan_that_does_not_tile_or_partition_is_refused(stages: list[Stage], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan(*stages)
    data = msgspec.msgpack.encode({"type": "Plan/1", "model": "m", "epoch": 1, "coordinator": "c", "stages": stages})
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.msgpack.decode(data, type=Plan)


def test_a_boundary_epoch_after_the_plan_and_roles_of_strangers_are_refused() -> None:
    with pytest.raises(ValueError, match="boundary_epoch 4"):
        plan(stage("s0", 0, None, "a"), epoch=3, boundary_epoch=4)
    odd = Stage(name="s0", length_min=0, length_max=None, instances=["a"], roles={"b": InstanceRole.DECODE})
    with pytest.raises(ValueError, match="roles names b"):
        plan(odd)


def shapes(*rows: tuple[int, int | None, int]) -> list[StageShape]:
    return [StageShape(length_min=low, length_max=high, instances=count) for low, high, count in rows]


THREE = shapes((0, 100, 3), (100, 1000, 2), (1000, None, 1))


def written(layout: list[StageShape], names: str, previous: list[Stage], homes: dict[str, int] | None = None) -> str:
    members = assign(layout, names, previous=previous, homes=homes)
    check = stages_of(layout, members, {})
    assert plan(*check).stages == check
    return " ".join("".join(each) or "-" for each in members)


def test_a_leave_and_a_join_move_nobody_else() -> None:
    before = stages_of(THREE, [["a", "b", "c"], ["d", "e"], ["f"]], {})
    assert written(THREE, "abdef", before) == "ab de f"
    assert written(THREE, "abcdefg", before) in {"abcg de f", "abc deg f", "abc de fg"}
    assert written(THREE, "abcdegh", before) == "abch de g"  # f left: its stage is the neediest


def test_a_stage_that_lost_everybody_is_covered_by_the_next_longer_then_by_the_nearest_shorter() -> None:
    stages = stages_of(THREE, [["a"], [], ["f"]], {})
    assert [s.covered_by for s in stages] == ["", "s2", ""]
    stages = stages_of(THREE, [["a"], ["b"], []], {})
    assert [s.covered_by for s in stages] == ["", "", "s1"]


def test_new_cuts_leave_instances_where_ranges_overlap() -> None:
    before = stages_of(THREE, [["a", "b", "c"], ["d", "e"], ["f"]], {})
    moved = shapes((0, 150, 3), (150, 1200, 2), (1200, None, 1))
    assert written(moved, "abcdef", before) == "abc de f"
    assert written(shapes((0, 100, 2), (100, None, 4)), "abcdef", before) == "ab cdef"


def test_each_stage_spreads_over_the_hosts() -> None:
    hosts = {name: "left" if name in "abcd" else "right" for name in "abcdefgh"}
    layout = shapes((0, 100, 4), (100, 1000, 2), (1000, None, 2))
    members = assign(layout, "abcdefgh", hosts=hosts)
    assert [sorted(hosts[name] for name in each) for each in members] == [
        ["left", "left", "right", "right"],
        ["left", "right"],
        ["left", "right"],
    ]


def test_every_instance_stands_in_one_stage_whatever_comes_and_goes() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        previous: list[Stage] = []
        layout = THREE
        for _ in range(12):
            names = [f"i{k}" for k in range(9) if rng.random() < 0.7]
            if rng.random() < 0.3:
                cuts = sorted(rng.sample(range(1, 50), rng.randrange(0, 4)))
                bounds = [0, *cuts, None]
                layout = shapes(*((bounds[k] or 0, bounds[k + 1], rng.randint(1, 4)) for k in range(len(bounds) - 1)))
            stages = stages_of(layout, assign(layout, names, previous=previous), {})
            plan(*stages)  # checks that they tile and partition
            assert sorted(n for s in stages for n in s.instances) == sorted(names)
            if [s.length_min for s in stages] == [s.length_min for s in previous]:
                stayed = {n: s.name for s in previous for n in s.instances}
                assert all(stayed.get(n, s.name) == s.name for s in stages for n in s.instances)
            previous = stages
