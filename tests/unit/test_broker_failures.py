"""The failure table of trading (CascadeInfer analysis, section c), row by row: what is lost, doubled, late or dead."""

from typing import Any

import pytest
from millrace.contracts.broker import (
    AskForMove,
    BoundaryMoved,
    DealEnded,
    DealPostponed,
    DealQueued,
    DealStarted,
    EvacuationAnnounced,
    GrantDeal,
    LoadReported,
    MoveBid,
    MoveReason,
    NoBid,
    OfferDeal,
    WithdrawDeal,
)
from millrace.contracts.kv import KvRefusal

from tests.unit.broker_rig import (
    MS,
    BrokerWorld,
    FakeInstance,
    FakeSequence,
    double,
    filled,
    late,
    lose,
    lose_first,
    plan,
)
from tests.unit.test_broker import STANDING

EVERY_KIND = (
    AskForMove,
    MoveBid,
    NoBid,
    OfferDeal,
    DealQueued,
    GrantDeal,
    DealStarted,
    DealPostponed,
    DealEnded,
    WithdrawDeal,
    LoadReported,
)


def draining(**config: Any) -> BrokerWorld:
    """Six sequences have to leave, by two targets and one slot each way at a time."""
    bounds = {"out_max": 1, "in_max": 1, "transfer_ms": 3_000, "reasons": STANDING} | config
    world = BrokerWorld(filled("a", 6, 100), FakeInstance("b"), FakeInstance("c"), **bounds)
    world.instances["a"].draining = True
    return world


def moved_once_each(world: BrokerWorld) -> None:
    """Everybody has left, nobody moved twice, nothing is open."""
    assert world.instances["a"].sequences == {}
    assert len(world.instances["b"].sequences) + len(world.instances["c"].sequences) == 6
    assert world.quiet()


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.__name__)
def test_after_the_first_five_of_a_kind_were_lost_everything_still_moves(kind):
    world = draining()
    world.tamper = lose_first(5, kind)
    world.run(20_000)
    moved_once_each(world)


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.__name__)
def test_a_doubled_message_changes_nothing(kind):
    world = draining()
    world.tamper = double(kind)
    world.run(6_000)
    moved_once_each(world)
    assert len(world.moves) == 6


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.__name__)
def test_a_message_that_is_always_lost_leaves_nothing_open_for_ever(kind):
    world = draining()
    world.tamper = lose(kind)
    world.run(4_000)
    world.tamper = lose()
    world.run(25_000)
    moved_once_each(world)


@pytest.mark.parametrize("by_ms", [40, 400, 4_000])
@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.__name__)
def test_a_late_message_does_no_harm(kind, by_ms):
    world = draining()
    world.tamper = late(by_ms * MS, kind)
    world.run(6_000)
    world.tamper = lose()
    world.run(25_000)
    moved_once_each(world)


def test_the_asker_dies_and_what_it_agreed_expires_at_the_target():
    world = BrokerWorld(filled("a", 6, 100), filled("d", 6, 100), FakeInstance("b"), out_max=1, in_max=1)
    world.transfer_ns = 300 * MS
    world.instances["a"].draining = world.instances["d"].draining = True
    while not world.deals("b", "in"):
        world.run(10)
    world.kill("a")
    world.run(20_000)
    assert world.deals("b", "in") == {}
    assert world.instances["d"].sequences == {}  # others were served meanwhile


def test_an_asker_that_was_started_again_trades_on():
    world = draining()
    world.run(300)
    world.kill("a")
    world.run(500)
    world.start_broker("a")
    world.run(25_000)
    moved_once_each(world)


def test_a_slot_is_free_again_when_the_askers_broker_was_started_anew_in_mid_transfer():
    world = BrokerWorld(filled("a", 2, 100), FakeInstance("b"), reasons=STANDING, settle=False)
    world.transfer_ns = 4_000 * MS
    world.instances["a"].draining = True
    while "moving" not in [state for _, _, _, state in world.deals("b", "in").values()]:
        world.run(10)
    world.kill("a")
    world.run(300)
    world.start_broker("a")
    world.run(1_000)
    assert [sequence for sequence, *_ in world.deals("b", "in").values()] == [
        sequence for sequence, *_ in world.deals("a", "out").values()
    ]


def test_a_transfer_whose_end_nobody_told_is_over_when_the_sequence_has_left():
    world = draining(transfer_ms=30_000)
    world.deaf_migrators = {"a"}
    world.run(25_000)
    moved_once_each(world)
    assert len(world.moves) == 6


def test_a_slot_whose_deals_end_was_lost_is_free_within_two_seconds():
    world = draining()
    world.tamper = lose(DealEnded)
    world.refuse = {"b": KvRefusal.NO_BLOCKS, "c": KvRefusal.NO_BLOCKS}  # nobody comes: no snapshot tells the end
    while not (moving := [deal for deal, (*_, state) in world.deals("b", "in").items() if state == "moving"]):
        world.run(10)
    world.run(2_000)
    assert not set(moving) & world.deals("b", "in").keys()
    assert world.metrics["b"].unheard_ends >= 1


def test_a_slot_is_free_within_five_seconds_where_the_source_answers_no_more():
    world = BrokerWorld(filled("a", 1, 100), FakeInstance("b"), reasons=STANDING)
    world.transfer_ns = 20_000 * MS
    world.instances["a"].draining = True
    world.run(1_000)
    assert [state for _, _, _, state in world.deals("b", "in").values()] == ["moving"]
    world.kill("a")
    world.run(5_000)
    assert world.deals("b", "in") == {}


def test_a_long_transfer_keeps_its_slot_while_its_source_confirms_it():
    world = BrokerWorld(filled("a", 1, 100), FakeInstance("b"), reasons=STANDING)
    world.transfer_ns = 12_000 * MS
    world.instances["a"].draining = True
    world.run(11_000)
    assert [state for _, _, _, state in world.deals("b", "in").values()] == ["moving"]
    world.run(3_000)
    assert world.where("ar0.0") == ["b"]
    assert world.metrics["b"].unheard_ends == 0


def test_the_receivers_broker_dies_and_another_one_is_asked():
    world = draining()
    world.run(200)
    world.kill("b")
    world.run(20_000)
    assert world.instances["a"].sequences == {}
    assert world.deals("a", "out") == {}


def test_the_receivers_engine_dies_in_mid_transfer_and_the_sequence_goes_elsewhere():
    world = BrokerWorld(filled("a", 2, 100), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    world.transfer_ns = 400 * MS
    world.instances["a"].draining = True
    while not world.moves:
        world.run(10)
    dead = world.moves[0][3]
    world.unregister(dead)
    world.run(30_000)
    assert world.instances["a"].sequences == {}
    alive = "c" if dead == "b" else "b"
    assert world.instances[alive].sequences


def test_a_migrator_that_never_answers_costs_a_slot_until_its_deadline_and_no_more():
    world = draining(transfer_ms=2_000)
    world.deaf_migrators = {"a"}
    world.run(20_000)
    moved_once_each(world)


def test_without_the_bus_nothing_is_traded_and_afterwards_only_on_fresh_snapshots():
    world = draining()
    world.run(150)
    world.partition(away=True)
    moves = len(world.moves)
    world.run(3_000)
    asked = len(world.bodies(AskForMove))
    assert len(world.moves) <= moves + 1
    assert all(state == "moving" for _, _, _, state in world.deals("a", "out").values())
    world.partition(away=False)
    assert len(world.bodies(AskForMove)) == asked
    world.run(20_000)
    moved_once_each(world)


def test_a_new_plan_voids_what_has_not_started_and_lets_transfers_end():
    world = BrokerWorld(filled("a", 6, 2_000), FakeInstance("b"), FakeInstance("c"), reasons=STANDING, in_max=1)
    world.transfer_ns = 500 * MS
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), (100_000, ["c"]), epoch=1))
    while len(world.deals("b", "in")) < 2:
        world.run(10)
    moving = [sequence for sequence, _, _, state in world.deals("b", "in").values() if state == "moving"]
    world.set_plan(plan((0, ["a"]), (1_000, ["c"]), (100_000, ["b"]), epoch=2))
    states = [state for _, _, _, state in world.deals("b", "in").values()]
    assert states == ["moving"] * len(moving)
    world.run(20_000)
    assert sorted(world.instances["b"].sequences) == sorted(moving)
    assert len(world.instances["c"].sequences) == 6 - len(moving)


def test_a_bid_of_an_older_plan_is_void():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), reasons=STANDING)
    world.tamper = late(30 * MS, MoveBid)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), epoch=1))
    while not world.bodies(MoveBid):
        world.run(1)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), epoch=2))
    world.run(40)
    assert world.bodies(OfferDeal) == []
    assert world.refused("a")["late_bid"] == 1
    world.run(3_000)
    assert world.where("ar0.0") == ["b"]


def test_a_stage_that_loses_everybody_is_passed_over_and_back_when_it_returns():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), FakeInstance("c"), reasons=STANDING, settle=False)
    world.instances["b"].silent = True
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), (4_000, ["c"])))
    world.run(3_000)
    assert world.where("ar0.0") == ["c"]


def test_a_downstream_that_refuses_for_long_keeps_the_sequence_where_it_is():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b", blocks=16), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"])))
    world.run(20_000)
    assert world.where("ar0.0") == ["a"]
    assert len(world.bodies(AskForMove)) < 10
    assert world.metrics["a"].deals["boundary", "no_bids"] == len(world.bodies(AskForMove))


def test_it_leaves_within_five_seconds_when_there_is_room_again():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b", blocks=16), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"])))
    world.run(20_000)
    world.instances["b"].blocks = 2_000
    world.run(5_000)
    assert world.where("ar0.0") == ["b"]


def test_an_instance_that_changes_its_stage_hands_on_what_is_too_long_and_keeps_what_is_short():
    sequences = {"short.0": FakeSequence(prompt=100), "long.0": FakeSequence(prompt=3_000)}
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b", sequences=sequences), FakeInstance("c"), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b", "c"]), epoch=1))
    world.run(3_000)
    assert world.moves == []  # nobody is moved down
    world.set_plan(plan((0, ["a", "b"]), (1_000, ["c"]), epoch=2))
    world.run(3_000)
    assert [(sequence, target) for _, sequence, _, target in world.moves] == [("long.0", "c")]


def test_nobody_needs_a_coordinator_to_go_on():
    """The last plan holds, boundaries are kept and sequences are handed on."""
    world = BrokerWorld(filled("a", 2, 900, token_ns=50 * MS), FakeInstance("b"), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"])))
    world.run(60_000)
    assert len(world.bodies(BoundaryMoved)) > 50
    assert world.instances["a"].sequences == {}
    assert world.quiet()


def test_a_broker_that_is_asked_to_stop_withdraws_what_has_not_started():
    world = BrokerWorld(filled("a", 4, 100), FakeInstance("b"), in_max=1)
    world.transfer_ns = 400 * MS
    world.instances["a"].draining = True
    while not any(state == "queued" for _, _, _, state in world.deals("a", "out").values()):
        world.run(10)
    world.stop("a")
    world.run(10)
    assert {body.detail for body in world.bodies(WithdrawDeal)} == {"broker_stops"}
    assert all(state == "moving" for _, _, _, state in world.deals("b", "in").values())


@pytest.mark.parametrize("seed", range(8))
def test_with_half_of_all_trade_messages_lost_doubled_or_late_everybody_leaves_once(seed):
    world = BrokerWorld(
        filled("a", 5, 300, token_ns=100 * MS),
        filled("b", 5, 300, token_ns=100 * MS),
        FakeInstance("c"),
        FakeInstance("d"),
        seed=seed,
        settle=False,
        transfer_ms=3_000,
        boundary_ms=1_000_000,
    )
    world.set_plan(plan((0, ["a", "b"]), (200, ["c", "d"])))
    rng = world.rng

    def noise(subject: str, body: object) -> list[int]:
        if not isinstance(body, EVERY_KIND) or rng.random() < 0.5:
            return [200_000]
        return rng.choice(([], [200_000, rng.randrange(900) * MS], [rng.randrange(2_000) * MS]))

    world.tamper = noise
    world.run(10_000)
    world.tamper = lose()
    world.run(25_000)
    assert {body.reason for body in world.bodies(AskForMove)} >= {MoveReason.BOUNDARY}
    assert not world.instances["a"].sequences
    assert not world.instances["b"].sequences
    assert len(world.instances["c"].sequences) + len(world.instances["d"].sequences) == 10
    assert world.quiet()


# evacuations


def evacuate(world: BrokerWorld, *, left_ms: int, span_ms: int = 500) -> None:
    """The migrator of a announces it every half second."""
    for at_ms in range(0, span_ms, 500):
        world.tell("mr.test.evacuation.a", EvacuationAnnounced(instance="a", left_ms=left_ms - at_ms), "migrator-a")
        world.run(500)


def test_an_announced_evacuation_moves_everything_though_the_instance_does_not_drain():
    world = BrokerWorld(filled("a", 6, 100), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    evacuate(world, left_ms=20_000, span_ms=3_000)
    moved_once_each(world)
    assert {body.reason for body in world.bodies(AskForMove)} == {MoveReason.DRAIN}


def test_an_announced_evacuation_is_asked_for_at_once():
    world = BrokerWorld(filled("a", 2, 100), FakeInstance("b"), reasons=STANDING)
    world.run(300)
    world.tell("mr.test.evacuation.a", EvacuationAnnounced(instance="a", left_ms=3_000), "migrator-a")
    world.run(20)
    assert len(world.bodies(AskForMove)) == 2


def test_an_instance_that_is_evacuated_takes_nothing():
    world = BrokerWorld(FakeInstance("a"), filled("b", 6, 100), FakeInstance("c"), reasons=STANDING)
    world.instances["b"].draining = True
    evacuate(world, left_ms=20_000, span_ms=4_000)
    assert len(world.instances["c"].sequences) == 6


def test_an_evacuation_ends_when_its_migrator_says_so_or_falls_silent():
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"), reasons=STANDING)
    evacuate(world, left_ms=20_000)
    world.tell("mr.test.evacuation.a", EvacuationAnnounced(instance="a", left_ms=0), "migrator-a")
    world.instances["a"].sequences["late.0"] = FakeSequence(prompt=100)
    world.run(3_000)
    assert world.where("late.0") == ["a"]
    evacuate(world, left_ms=20_000)
    assert world.where("late.0") == ["b"]
    world.run(3_000)
    world.instances["a"].sequences["later.0"] = FakeSequence(prompt=100)
    world.run(3_000)
    assert world.where("later.0") == ["a"]


def test_what_finds_no_room_while_its_instance_drains_is_offered_again_every_half_second():
    world = BrokerWorld(filled("a", 1, 1_000), FakeInstance("b", blocks=10), reasons=STANDING)
    world.instances["a"].draining = True
    world.run(10_000)
    assert len(world.bodies(AskForMove)) >= 12


def test_an_evacuation_with_an_absurd_limit_is_refused():
    world = BrokerWorld(filled("a", 1, 100), FakeInstance("b"), reasons=STANDING)
    world.tell("mr.test.evacuation.a", EvacuationAnnounced(instance="a", left_ms=-5), "migrator-a")
    world.run(1_000)
    assert world.moves == []
    assert world.refused("a") == {"evacuation": 1}


def test_a_drain_does_not_wait_for_ticks():
    world = BrokerWorld(filled("a", 40, 100), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    world.transfer_ns = 20 * MS
    world.instances["a"].draining = True
    world.run(1_200)  # with a few asks per tick of 200 ms it would take two seconds
    assert world.instances["a"].sequences == {}
    assert len(world.moves) == 40, "nobody is asked for after it has left"


def test_a_full_stage_is_passed_over_while_draining():
    world = BrokerWorld(filled("a", 1, 500), FakeInstance("b", blocks=10), FakeInstance("c"), reasons=STANDING)
    world.set_plan(plan((0, ["a", "b"]), (1_000, ["c"])))
    world.run(1_000)
    world.instances["a"].draining = True
    world.run(2_000)
    assert world.where("ar0.0") == ["c"]
