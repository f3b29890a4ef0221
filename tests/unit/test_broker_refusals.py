"""Trade messages that are forged, replayed, misdirected or absurd: counted, refused, and no request changes."""

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import msgspec.inspect
import pytest
from millrace.contracts.broker import AskForMove, BoundaryMoved, LoadsReported, MoveBid
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import MigrationFinished

from tests.testbed.messages import plain
from tests.unit.broker_rig import EAGER, BrokerWorld, FakeInstance, filled, plan

#: Types that brokers send to each other.
TOLD = (AskForMove, BoundaryMoved, LoadsReported, MoveBid)


def subject_of(body: Body, to: str) -> str:
    match body:
        case AskForMove():
            return f"mr.test.ask.m.{to}"
        case MoveBid(bidder=bidder):
            return f"mr.test.bid.{to}.{bidder or 'b'}"
        case LoadsReported(loads=loads):
            return f"mr.test.load.m.{(loads[0].stage if loads else '') or 'unplanned'}"
        case BoundaryMoved(stage=stage):
            return f"mr.test.boundary.m.{stage}"


@pytest.mark.parametrize("kind", [AskForMove, MoveBid, MigrationFinished])
def test_a_message_on_the_subject_of_an_instance_that_is_not_ours_is_counted_and_changes_nothing(kind: type[Body]):
    world = BrokerWorld(filled("a", 6, 400), FakeInstance("b"), FakeInstance("c"), out_max=1)
    world.set_plan(plan((0, ["a"]), (200, ["b", "c"])))
    world.run(450)
    (subject, sender, body) = next((s, r, b) for _, s, r, b in world.said if isinstance(b, kind))
    tokens = subject.split(".")
    tokens[3 if kind is MoveBid else -1] = "elsewhere"
    before = world.brokers["b"].snapshot()
    world.brokers["b"].handle(Message(body, ".".join(tokens), sender, "_INBOX.1"), world.now_ns)
    assert world.brokers["b"].snapshot() == before
    assert world.refused("b")["misdirected"] == 1


def test_two_keepers_that_crossed_are_believed_again_when_they_cross_no_more():
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"), FakeInstance("c"), reasons=[], boundary_ms=60_000)
    world.set_plan(msgspec.structs.replace(plan((0, ["a"]), (200, ["b"]), (300, ["c"])), boundary_epoch=1))
    for stage, above, keeper, length, version in (
        ("s0", "s1", "a", 260, 1),
        ("s1", "s2", "b", 250, 1),
        ("s1", "s2", "b", 270, 2),
    ):
        told = {"stage": stage, "next_stage": above, "length": length, "version": version, "keeper": keeper}
        body = plain(BoundaryMoved, **told)
        world.tell(f"mr.test.boundary.m.{stage}", body, f"broker-{keeper}")
        world.run(1)
    assert world.brokers["c"].snapshot()["boundaries"] == {"m/s0": 260, "m/s1": 270}


INTEGERS = (-(2**63), -1, 0, 1, 1, 1, 1, 2, 7, 100, 2**31, 2**40, 2**62, 2**63 - 1)
NUMBERS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 1e308)
NAMES = ("a", "b", "c", "", "d", "m", "s0", "s1", "s2", "ar0.0", "ar1.0", "br0.0", "feed", "no.where")


def absurd(kind: type[Any], rng: Random) -> Iterator[Any]:
    """Bodies of a kind with any names and numbers, forever."""
    fields = {field.name: field.type for field in msgspec.inspect.type_info(kind).fields}
    while True:
        yield kind(**{name: _drawn(each, rng) for name, each in fields.items()})


def _drawn(kind: Any, rng: Random) -> Any:
    match kind:
        case msgspec.inspect.IntType():
            return rng.choice([each for each in INTEGERS if _within(kind, each)])
        case msgspec.inspect.FloatType():
            return rng.choice([each for each in NUMBERS if _within(kind, each)])
        case msgspec.inspect.BoolType():
            return rng.random() < 0.5
        case msgspec.inspect.StrType():
            return rng.choice(NAMES)
        case msgspec.inspect.NoneType():
            return None
        case msgspec.inspect.EnumType(cls=cls):
            return rng.choice(list(cls))
        case msgspec.inspect.UnionType(types=types):
            return _drawn(rng.choice(types), rng)
        case msgspec.inspect.ListType(item_type=item):
            return [_drawn(item, rng) for _ in range(rng.choice((0, 1, 3, 17)))]
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: _drawn(field.type, rng) for field in fields})
    raise AssertionError(kind)


def _within(kind: Any, value: float) -> bool:
    """Whether the codec lets the value through."""
    least, most = kind.ge if kind.ge is not None else kind.gt, kind.le if kind.le is not None else kind.lt
    bounds = (least is None or value > least or value == kind.ge, most is None or value < most or value == kind.le)
    return all(bounds)


@pytest.mark.parametrize("policy", [EAGER, "delay"])
def test_any_names_and_numbers_of_a_known_broker_end_no_broker_and_move_no_request_that_stays(policy: str):
    """Its instance's own requests stay: the fuzzer speaks for b, of anything."""
    world = BrokerWorld(filled("a", 4, 100), filled("b", 4, 100), FakeInstance("c"), policy=policy, reasons=["balance"])
    world.set_plan(plan((0, ["a", "b"]), (3_000, ["c"])))
    rng = Random(f"{policy}/absurd")
    bodies = {kind: absurd(kind, rng) for kind in TOLD}
    for _ in range(300):
        for kind in TOLD:
            body = _spoken_by_b(next(bodies[kind]), plausible=rng.random() < 0.7)
            world.tell(subject_of(body, "a"), body, "broker-b", lambda answer: None)
        world.run(7)
    everybody = sorted(name for each in world.instances.values() for name in each.sequences)
    assert everybody == sorted(f"{name}r{index}.0" for name in "ab" for index in range(4))
    world.run(8_000)
    assert world.quiet()


def _spoken_by_b(body: Any, *, plausible: bool) -> Any:
    """The same, of b; where plausible, of its model, plan and age."""
    names = {"bidder": "b", "source": "b", "instance": "b", "keeper": "b", "target": "a"}
    if isinstance(body, MoveBid):
        names["source"] = "a"
    likely: dict[str, Any] = {"model": "m", "plan_epoch": 1, "incarnation": 5, "at_ns": 2**62, "stage": "s0"}
    likely |= {"next_stage": "s1", "blocks_free": 10, "blocks_total": 100, "prompt_tokens": 100, "max_tokens": 1_000}
    names |= likely if plausible else {}
    if isinstance(body, LoadsReported):
        return LoadsReported(loads=[_replaced(load, names) for load in body.loads])
    return _replaced(body, names)


def _replaced(body: Any, fields: dict[str, Any]) -> Any:
    return msgspec.structs.replace(
        body, **{name: value for name, value in fields.items() if name in body.__struct_fields__}
    )
