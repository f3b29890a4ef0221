"""Boundaries between stages: who keeps one, how it moves, and which messages about it count."""

from itertools import pairwise

import msgspec
import pytest
from millrace.contracts.broker import BoundaryMoved, MoveReason

from tests.testbed.messages import plain
from tests.unit.broker_rig import BrokerWorld, FakeInstance, filled, plan
from tests.unit.test_broker import heard


def staged(**config) -> BrokerWorld:
    """Many long sequences below the cut, few above: the boundary has to fall."""
    world = BrokerWorld(
        filled("a", 12, 900), filled("b", 12, 900), filled("c", 1, 5_000), reasons=[MoveReason.HANDOFF], **config
    )
    world.set_plan(plan((0, ["a", "b"]), (2_000, ["c"])))
    return world


def told(world: BrokerWorld) -> list[BoundaryMoved]:
    return world.bodies(BoundaryMoved)


def test_one_instance_of_the_lower_stage_keeps_the_boundary_and_tells_it_every_second():
    world = staged()
    world.run(5_000)
    assert len({body.keeper for body in told(world)}) == 1
    assert told(world)[0].keeper in ("a", "b")
    assert 4 <= len(told(world)) <= 6


def test_it_moves_by_ten_percent_a_round_at_most_and_each_change_has_a_version():
    world = staged()
    world.run(10_000)
    lengths = [2_000, *(body.length for body in told(world))]
    assert lengths[-1] < lengths[0]
    for before, after in pairwise(lengths):
        assert before / 1.11 <= after <= before * 1.11
    versions = [body.version for body in told(world)]
    assert versions == sorted(versions)
    assert {body.plan_epoch for body in told(world)} == {1}


def test_it_stays_while_there_are_fewer_than_five_sequences_and_is_not_told_each_second():
    world = BrokerWorld(filled("a", 3, 1_500), filled("c", 1, 5_000), reasons=[MoveReason.HANDOFF])
    world.set_plan(plan((0, ["a"]), (2_000, ["c"])))
    world.run(4_000)
    (body,) = told(world)
    assert body.length == 2_000
    assert body.why.startswith("frozen")
    world.run(10_000)
    assert len(told(world)) == 2


def test_the_next_one_keeps_it_when_the_keeper_falls_silent_and_goes_on_from_there():
    world = staged()
    world.run(4_000)
    first = told(world)[-1]
    world.kill(first.keeper)
    world.instances[first.keeper].silent = True
    world.run(5_000)
    last = told(world)[-1]
    assert last.keeper == ({"a", "b"} - {first.keeper}).pop()
    assert last.version >= first.version
    following = next(body for body in told(world) if body.keeper == last.keeper)
    assert first.length / 1.11 <= following.length <= first.length * 1.11


def test_it_is_frozen_while_the_bus_is_away():
    world = staged()
    world.run(3_000)
    world.partition(away=True)
    rounds, before = len(told(world)), world.brokers["a"].snapshot()["boundaries"]
    world.run(5_000)
    assert len(told(world)) == rounds
    assert world.brokers["a"].snapshot()["boundaries"] == before
    world.partition(away=False)
    world.run(3_000)
    assert len(told(world)) > rounds


def test_a_plan_with_other_cuts_voids_it():
    world = staged()
    world.run(4_000)
    moved = msgspec.structs.replace(plan((0, ["a", "b"]), (700, ["c"]), epoch=2), boundary_epoch=2)
    world.set_plan(moved)
    assert world.brokers["c"].snapshot()["boundaries"] == {}


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"plan_epoch": 0}, 1),
        ({"plan_epoch": 7}, 1),
        ({"stage": "s9"}, 1),
        ({"next_stage": "s0"}, 1),
        ({"model": "other"}, 1),
        ({"version": -1}, 1),
        ({"keeper": "b"}, 1),  # of another stage
        ({"length": 4_500, "version": 9}, 0),  # crosses the next cut
        ({"stage": "s1", "next_stage": "s2", "length": 500, "keeper": "b"}, 0),  # crosses the one before
    ],
)
def test_a_boundary_not_of_this_plan_is_counted_and_of_two_that_cross_the_plans_hold(changes, counted):
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"), FakeInstance("c"), reasons=[])
    stages = plan((0, ["a"]), (2_000, ["b"]), (4_000, ["c"]))
    world.set_plan(msgspec.structs.replace(stages, boundary_epoch=1))
    right = plain(BoundaryMoved, length=900, keeper="a")
    heard(world, "boundary.m.s0", right, "broker-a")
    before = world.brokers["c"].snapshot()["boundaries"]
    assert before == {"m/s0": 900}
    wrong = msgspec.structs.replace(right, **{"length": 300} | changes)
    heard(world, f"boundary.m.{wrong.stage}", wrong, f"broker-{wrong.keeper}")
    found = world.brokers["c"].snapshot()["boundaries"]
    assert found == before if counted else found["m/s0"] == 2_000
    assert world.refused("c").get("boundary", 0) == counted
