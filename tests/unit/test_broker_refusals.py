"""Trade messages that are forged, replayed, misdirected or absurd: counted, refused, and no request changes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import msgspec.inspect
import pytest
from millrace.contracts.broker import (
    AskForMove,
    BoundaryMoved,
    DealEnded,
    DealRefused,
    DealStarted,
    GrantDeal,
    LoadReported,
    MoveBid,
    MoveReason,
    NoBid,
    OfferDeal,
    WithdrawDeal,
)
from millrace.contracts.catalog_broker import BROKER_TYPES
from millrace.contracts.codec import MalformedMessage, decode, encode
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrationOutcome

from tests.unit.broker_rig import EAGER, MS, BrokerWorld, FakeInstance, filled, plan

TRADES = (AskForMove, MoveBid, NoBid, OfferDeal, GrantDeal, DealStarted, WithdrawDeal, DealEnded)


def staged(**config: Any) -> BrokerWorld:
    """Six sequences of ``a`` belong to ``b`` or ``c``; one slot each way."""
    world = BrokerWorld(filled("a", 6, 400), FakeInstance("b"), FakeInstance("c"), out_max=1, in_max=1, **config)
    world.set_plan(plan((0, ["a"]), (200, ["b", "c"])))
    return world


def subject_of(body: Body, to: str) -> str:
    match body:
        case AskForMove():
            return f"mr.test.ask.m.{to}"
        case MoveBid() | NoBid():
            return f"mr.test.bid.{to}"
        case LoadReported(stage=stage):
            return f"mr.test.load.m.{stage or 'unplanned'}"
        case BoundaryMoved(stage=stage):
            return f"mr.test.boundary.m.{stage}"
        case _:
            return f"mr.test.deal.{to}"


def recorded(world: BrokerWorld, ms: int) -> list[tuple[str, str, Body]]:
    """Subject, sender and body of each trade message of that time."""
    begin = len(world.said)
    world.run(ms)
    return [(subject, sender, body) for _, subject, sender, body in world.said[begin:] if isinstance(body, TRADES)]


def state_of(world: BrokerWorld) -> tuple[Any, ...]:
    return world.moves, {name: sorted(each.sequences) for name, each in world.instances.items()}


def test_a_conversation_that_is_replayed_afterwards_moves_nothing_and_is_counted():
    world = staged()
    said = recorded(world, 8_000)
    assert {type(body) for _, _, body in said} >= {AskForMove, MoveBid, OfferDeal, GrantDeal, DealEnded}
    assert world.quiet()
    before = state_of(world)
    refused = {name: world.refused(name) for name in world.instances}
    for subject, sender, body in said:
        world.tell(subject, body, sender, lambda answer: None)
    world.run(10)
    counted = {
        kind: sum(world.refused(name).get(kind, 0) - refused[name].get(kind, 0) for name in world.instances)
        for kind in ("late_bid", "late_grant", "late_end", "offer_no_bid")
    }
    assert counted == {
        "late_bid": sum(
            isinstance(body, AskForMove | MoveBid | NoBid) for _, _, body in said
        ),  # asks are answered anew
        "late_grant": sum(isinstance(body, GrantDeal) for _, _, body in said),
        "late_end": sum(isinstance(body, DealStarted | DealEnded | WithdrawDeal) for _, _, body in said),
        "offer_no_bid": sum(isinstance(body, OfferDeal) for _, _, body in said),
    }
    world.run(2_000)  # bids for repeated asks hold for a second
    assert state_of(world) == before
    assert world.quiet()


@pytest.mark.parametrize("kind", TRADES)
@pytest.mark.parametrize("sender", ["", "broker-d", "somebody", "broker-of-nobody"])
def test_a_trade_of_somebody_else_is_counted_and_changes_nothing(kind: type[Body], sender: str):
    world = staged()
    world.run(450)  # one moves, others wait
    for subject, right, body in [(s, r, b) for _, s, r, b in world.said if isinstance(b, kind)][-3:] or _made(kind):
        to = subject.rpartition(".")[2]
        assert right != sender
        before, refused = world.brokers[to].snapshot(), world.refused(to).get("forged", 0)
        world.brokers[to].handle(_message(subject, sender, body), world.now_ns)
        assert world.brokers[to].snapshot() == before
        assert world.refused(to)["forged"] == refused + 1


@pytest.mark.parametrize("kind", TRADES)
def test_a_trade_that_reaches_an_instance_it_is_not_for_is_counted_and_changes_nothing(kind: type[Body]):
    world = staged()
    world.run(450)
    for subject, sender, body in [(s, r, b) for _, s, r, b in world.said if isinstance(b, kind)][-1:] or _made(kind):
        if isinstance(body, AskForMove):
            continue  # anybody may be asked
        head, _, to = subject.rpartition(".")
        other = next(name for name in "abc" if name not in (to, getattr(body, "bidder", ""), body.source))
        before = world.brokers[other].snapshot()
        world.brokers[other].handle(_message(f"{head}.{other}", sender, body), world.now_ns)
        assert world.brokers[other].snapshot() == before
        assert world.refused(other)["misdirected"] == 1


def _message(subject: str, sender: str, body: Body) -> Any:
    from millrace.contracts.message import Message

    return Message(body=body, subject=subject, sender=sender, reply_to="_INBOX.1")


def _made(kind: type[Body]) -> list[tuple[str, str, Body]]:
    """One of a kind that was not said in that time."""
    names = {"deal": "feed", "sequence": "ar0.0", "source": "a"}
    if kind is NoBid:
        body: Body = NoBid(**names, bidder="b", reason="full")
        return [("mr.test.bid.a", "broker-b", body)]
    if kind is GrantDeal:
        return [("mr.test.deal.a", "broker-b", GrantDeal(**names, target="b", epoch=-1, start_within_ms=500))]
    fields: dict[str, Any] = {**names, "target": "b", "epoch": -1}
    fields |= {"outcome": MigrationOutcome.MOVED} if kind is DealEnded else {}
    return [("mr.test.deal.b", "broker-a", kind(**fields))]


def test_an_offer_of_another_size_than_was_asked_for_is_refused():
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"), reasons=[])
    ask = {"deal": "feed", "sequence": "x.0", "epoch": -1, "source": "a", "reason": MoveReason.BALANCE}
    asked = AskForMove(**ask, model="m", plan_epoch=-1, prompt_tokens=100, output_tokens=10, blocks=7, max_tokens=100)
    for changes in ({"blocks": 1_000_000}, {"tokens": 5}, {"reason": MoveReason.DRAIN}, {"moves": -2}):
        world.tell("mr.test.ask.m.b", asked, "broker-a")
        world.run(1)
        offer = OfferDeal(**ask | {"target": "b", "plan_epoch": -1, "tokens": 110, "blocks": 7} | changes)
        answers: list[Body] = []
        world.tell("mr.test.deal.b", offer, "broker-a", answers.append)
        world.run(1)
        assert isinstance(answers[0], DealRefused), changes
        assert answers[0].reason == "invalid"
    assert world.quiet()


def test_a_grant_does_not_hold_a_deal_for_longer_than_slots_are_kept():
    world = staged()
    world.transfer_ns = 3_000 * MS

    def stretched(subject: str, body: Body) -> list[int]:
        return [200_000]

    world.tamper = stretched
    world.run(450)
    queued = [deal for deal, (_, _, _, state) in world.deals("a", "out").items() if state == "queued"]
    deal = queued[0]
    sequence, _, target, _ = world.deals("a", "out")[deal]
    grant = GrantDeal(
        deal=deal, sequence=sequence, epoch=-1, source="a", target=target, start_within_ms=1 << 40, starving=True
    )
    world.tell("mr.test.deal.a", grant, f"broker-{target}", lambda answer: None)
    world.run(5)
    assert world.deals("a", "out")[deal][3] == "granted"
    world.run(2_600)
    assert world.deals("a", "out").get(deal, ["", "", "", ""])[3] != "granted"


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"length": 1 << 40}, 1),
        ({"keeper": "c"}, 1),  # of another stage
        ({"length": 4_000}, 0),  # crosses the next cut
        ({"stage": "s1", "next_stage": "s2", "length": 200, "keeper": "b"}, 0),  # crosses the one before
    ],
)
def test_a_boundary_that_crosses_its_neighbour_or_that_another_stage_keeps_changes_nothing(
    changes: dict[str, Any], counted: int
):
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"), FakeInstance("c"), reasons=[], boundary_ms=60_000)
    world.set_plan(msgspec.structs.replace(plan((0, ["a"]), (200, ["b"]), (4_000, ["c"])), boundary_epoch=1))
    right = {"model": "m", "stage": "s0", "next_stage": "s1", "length": 300, "plan_epoch": 1, "version": 5}
    body = BoundaryMoved(**{**right, "keeper": "a", "at_ns": 0} | changes)
    world.tell(f"mr.test.boundary.m.{body.stage}", body, f"broker-{body.keeper}")
    world.run(1)
    snapshots = {name: broker.snapshot()["instances"][name] for name, broker in world.brokers.items()}
    assert [snapshots[name]["boundary"] for name in "abc"] == [200, 4_000, None]
    assert world.refused("a").get("boundary", 0) == counted


def test_two_keepers_that_crossed_are_believed_again_when_they_cross_no_more():
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"), FakeInstance("c"), reasons=[], boundary_ms=60_000)
    world.set_plan(msgspec.structs.replace(plan((0, ["a"]), (200, ["b"]), (300, ["c"])), boundary_epoch=1))
    for stage, above, keeper, length, version in (
        ("s0", "s1", "a", 260, 1),
        ("s1", "s2", "b", 250, 1),
        ("s1", "s2", "b", 270, 2),
    ):
        body = BoundaryMoved(
            model="m",
            stage=stage,
            next_stage=above,
            length=length,
            plan_epoch=1,
            version=version,
            keeper=keeper,
            at_ns=0,
        )
        world.tell(f"mr.test.boundary.m.{stage}", body, f"broker-{keeper}")
        world.run(1)
    assert world.brokers["c"].snapshot()["boundaries"] == {"m/s0": 260, "m/s1": 270}


# Any bytes and any numbers


@pytest.mark.parametrize("kind", BROKER_TYPES)
def test_a_message_with_a_field_of_another_type_never_reaches_the_actor(kind: type[Body]):
    body = next(absurd(kind, Random(1)))
    fields = msgspec.msgpack.decode(encode(body))
    for name in kind.__struct_fields__:
        with pytest.raises(MalformedMessage):
            decode(msgspec.msgpack.encode({**fields, name: {"of": "another type"}}))
    with pytest.raises(MalformedMessage):
        decode(encode(body)[:-1])


INTEGERS = (-(2**63), -1, 0, 1, 1, 1, 1, 2, 7, 100, 2**31, 2**40, 2**62, 2**63 - 1)
NUMBERS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 1e308)
NAMES = ("a", "b", "c", "", "d", "m", "s0", "s1", "s2", "ar0.0", "ar1.0", "br0.0", "feed", "no.where")


def absurd(kind: type[Body], rng: Random) -> Iterator[Any]:
    """Bodies of a kind with any names and numbers, forever."""
    fields = {field.name: field.type for field in msgspec.inspect.type_info(kind).fields}
    while True:
        yield kind(**{name: _drawn(each, rng) for name, each in fields.items()})


def _drawn(kind: Any, rng: Random) -> Any:
    match kind:
        case msgspec.inspect.IntType():
            return rng.choice(INTEGERS)
        case msgspec.inspect.FloatType():
            return rng.choice(NUMBERS)
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


@pytest.mark.parametrize("policy", [EAGER, "delay", "none"])
def test_any_names_and_numbers_of_a_known_broker_end_no_broker_and_move_no_request_that_stays(policy: str):
    """Its instance's own requests stay: the fuzzer speaks for b, of anything."""
    world = BrokerWorld(filled("a", 4, 100), filled("b", 4, 100), FakeInstance("c"), policy=policy, reasons=["balance"])
    world.set_plan(plan((0, ["a", "b"]), (3_000, ["c"])))
    kinds = [kind for kind in BROKER_TYPES if kind in (*TRADES, LoadReported, BoundaryMoved)]
    rng = Random(f"{policy}/absurd")
    bodies = {kind: absurd(kind, rng) for kind in kinds}
    for _ in range(300):
        for kind in kinds:
            body = _spoken_by_b(next(bodies[kind]), plausible=rng.random() < 0.7)
            world.tell(subject_of(body, "a"), body, "broker-b", lambda answer: None)
        world.run(7)
    everybody = sorted(name for each in world.instances.values() for name in each.sequences)
    assert everybody == sorted(f"{name}r{index}.0" for name in "ab" for index in range(4))
    world.run(8_000)
    assert world.quiet()


def _spoken_by_b(body: Any, *, plausible: bool) -> Any:
    """The same, so that it is not refused for its sender alone; where plausible, nor for its model, plan or age."""
    names = {"bidder": "b", "source": "b", "instance": "b", "keeper": "b", "target": "a"}
    if isinstance(body, MoveBid | NoBid):
        names["source"] = "a"
    elif isinstance(body, GrantDeal):
        names |= {"source": "a", "target": "b"}
    likely: dict[str, Any] = {"model": "m", "plan_epoch": 1, "incarnation": 5, "at_ns": 2**62, "stage": "s0"}
    likely |= {"next_stage": "s1", "blocks_free": 10, "blocks_total": 100, "prompt_tokens": 100, "max_tokens": 1_000}
    names |= likely if plausible else {}
    return _replaced(body, names)


def _replaced(body: Any, fields: dict[str, Any]) -> Any:
    return msgspec.structs.replace(
        body, **{name: value for name, value in fields.items() if name in body.__struct_fields__}
    )
