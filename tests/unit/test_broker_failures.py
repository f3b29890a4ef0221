"""The failure table of trading (CascadeInfer analysis, section c), row by row: what is lost, doubled, late or dead."""

from typing import Any

import pytest
from millrace.contracts.broker import AskForMove, LoadsReported, MoveBid, MoveReason
from millrace.contracts.kv import KvRefusal
from millrace.contracts.migration import (
    EvacuateInstance,
    InstanceEvacuated,
    MigrationFinished,
    MigrationMode,
    MigrationOutcome,
)
from millrace.contracts.status import SequenceState

from tests.unit.broker_rig import HOP_NS, MS, BrokerWorld, FakeInstance, FakeSequence, arriving, filled, plan
from tests.unit.test_broker import STANDING

EVERY_KIND = (AskForMove, MoveBid, MigrationFinished, LoadsReported)


def draining(**config: Any) -> BrokerWorld:
    """Six sequences have to leave to two targets."""
    bounds = {"out_max": 1, "reasons": STANDING} | config
    world = BrokerWorld(filled("a", 6, 100), FakeInstance("b"), FakeInstance("c"), **bounds)
    world.instances["a"].draining = True
    return world


def moved_once_each(world: BrokerWorld) -> None:
    """Everybody has left, nobody moved twice, nothing is open."""
    assert world.instances["a"].sequences == {}
    assert len(world.instances["b"].sequences) + len(world.instances["c"].sequences) == 6
    assert world.quiet()


@pytest.mark.parametrize("delays_ns", [[HOP_NS, 40 * MS], [], [40 * MS], [4_000 * MS]])
@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.__name__)
def test_messages_that_are_doubled_lost_or_late_for_seconds_leave_nothing_open(kind, delays_ns):
    world = draining()
    world.tamper = arriving(delays_ns, kind)
    world.run(5_000)
    assert len(delays_ns) < 2 or len(world.moves) == 6
    world.tamper = arriving([])
    world.run(25_000)
    moved_once_each(world)


def test_the_asker_dies_and_its_bids_expire_at_the_target():
    world = BrokerWorld(filled("a", 6, 100), filled("d", 6, 100), FakeInstance("b"))
    world.transfer_ns = 300 * MS
    world.instances["a"].draining = world.instances["d"].draining = True
    while not world.open("b", "in"):
        world.run(10)
    world.kill("a")
    world.run(20_000)
    assert world.open("b", "in") == {}
    assert world.instances["d"].sequences == {}  # others were served meanwhile


def test_a_transfer_whose_end_nobody_told_is_over_when_the_sequence_has_left():
    world = draining()
    world.deaf_migrators = {"a"}
    world.run(25_000)
    moved_once_each(world)
    assert len(world.moves) == 6


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


def test_without_the_bus_nothing_is_traded_and_afterwards_only_on_fresh_snapshots():
    world = draining()
    world.run(150)
    world.partition(away=True)
    moves = len(world.moves)
    world.run(3_000)
    asked = len(world.bodies(AskForMove))
    assert len(world.moves) <= moves + 1
    assert all(state == "moving" for _, _, _, state in world.open("a", "out").values())
    world.partition(away=False)
    assert len(world.bodies(AskForMove)) == asked
    world.run(20_000)
    moved_once_each(world)


def test_a_new_plan_voids_what_has_not_started_and_lets_transfers_end():
    world = BrokerWorld(filled("a", 6, 2_000), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    world.transfer_ns = 500 * MS
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), (100_000, ["c"]), epoch=1))
    while not [state for *_, state in world.open("a", "out").values() if state == "moving"]:
        world.run(1)
    moving = [sequence for sequence, _, _, state in world.open("a", "out").values() if state == "moving"]
    world.set_plan(plan((0, ["a"]), (1_000, ["c"]), (100_000, ["b"]), epoch=2))
    assert [state for *_, state in world.open("a", "out").values()] == ["moving"] * len(moving)
    assert world.open("b", "in") == {}
    world.run(20_000)
    assert sorted(world.instances["b"].sequences) == sorted(moving)
    assert len(world.instances["c"].sequences) == 6 - len(moving)


def test_a_bid_of_an_older_plan_is_void():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), reasons=STANDING)
    world.tamper = arriving([30 * MS], MoveBid)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), epoch=1))
    while not world.bodies(MoveBid):
        world.run(1)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), epoch=2))
    world.run(40)
    assert world.moves == []
    assert world.refused("a")["late_bid"] == 1
    world.run(3_000)
    assert world.where("ar0.0") == ["b"]


def test_a_sequence_stays_while_downstream_refuses_and_leaves_within_five_seconds_of_room():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b", blocks=16), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"])))
    world.run(20_000)
    assert world.where("ar0.0") == ["a"]
    assert len(world.bodies(AskForMove)) < 10
    assert world.metrics["a"].ended.counts["boundary", "no_bids"] == len(world.bodies(AskForMove))
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


def evacuate(world: BrokerWorld, limit_ms: int = 20_000, instance: str = "a") -> list[InstanceEvacuated]:
    return world.order(instance, "evacuate", EvacuateInstance(limit_ms=limit_ms))


def test_an_evacuation_asks_at_once():
    world = BrokerWorld(filled("a", 2, 2_000), FakeInstance("b"), reasons=STANDING)
    world.run(300)
    evacuate(world, limit_ms=3_000)
    world.run(20)
    assert len(world.bodies(AskForMove)) == 2


def test_an_instance_that_is_evacuated_takes_nothing():
    world = BrokerWorld(FakeInstance("a"), filled("b", 6, 2_000), FakeInstance("c"), reasons=STANDING)
    world.instances["b"].draining = True
    world.instances["a"].sequences["stays.0"] = FakeSequence(prompt=100, immovable="a test")
    evacuate(world)
    world.run(4_000)
    assert len(world.instances["c"].sequences) == 6


def test_a_second_asker_waits_with_the_first_and_a_longer_limit_holds():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b", blocks=10), reasons=STANDING)
    first, second = evacuate(world, limit_ms=1_000), evacuate(world, limit_ms=3_000)
    world.run(2_500)
    assert first == second == []
    world.run(1_000)
    assert first == second == [InstanceEvacuated(instance="a", moved=0, failed=0, left={"not taken: no_room": 1})]


def test_what_is_left_at_the_limit_is_counted_by_its_reason():
    world = BrokerWorld(filled("a", 3, 2_000), FakeInstance("b", blocks=10), reasons=STANDING)
    world.instances["a"].sequences["grammar.0"] = FakeSequence(prompt=100, immovable="a grammar")
    answers = evacuate(world, limit_ms=1_000)
    world.run(2_000)
    assert [body.left for body in answers] == [{"not taken: no_room": 3, "cannot move: a grammar": 1}]


def test_an_evacuation_moves_everything_however_much_moves_have_cost_lately():
    """Computing 30 tokens anew takes 10 ms, but needs a place elsewhere as well, and maybe a wait for it."""
    world = BrokerWorld(filled("a", 2, 2_000), FakeInstance("b"), reasons=STANDING, settle=False)
    costs = world.brokers["a"]._owns["a"].costs
    costs.frozen_ns, costs.duration_ns = 1_000 * MS, 1_000 * MS
    world.instances["a"].sequences["short.0"] = FakeSequence(prompt=20)
    world.run(300)
    answers = evacuate(world)
    world.run(5_000)
    assert answers == [InstanceEvacuated(instance="a", moved=3, failed=0)]
    assert {body.reason for body in world.bodies(AskForMove)} == {MoveReason.DRAIN}


def test_an_evacuation_without_anywhere_to_go_is_answered_at_once():
    world = BrokerWorld(filled("a", 2, 2_000), reasons=STANDING)
    answers = evacuate(world)
    world.run(10)
    assert [body.left for body in answers] == [{"no other instance serves the model": 2}]


def test_a_failure_of_the_sequence_is_tried_five_times():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), reasons=STANDING)
    world.refuse["b"] = KvRefusal.COPY_FAILED
    answers = evacuate(world)
    world.run(10_000)
    assert answers == [InstanceEvacuated(instance="a", moved=0, failed=5, left={"failed 5 times: copy_failed": 1})]


def test_what_finds_no_room_while_its_instance_drains_is_offered_again_and_again():
    world = BrokerWorld(filled("a", 1, 1_000), FakeInstance("b", blocks=10), reasons=STANDING)
    world.instances["a"].draining = True
    world.run(10_000)
    assert len(world.bodies(AskForMove)) >= 24


def test_a_broker_that_stops_answers_who_waits():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b", blocks=10), reasons=STANDING)
    answers = evacuate(world)
    world.run(50)
    world.stop("a")
    world.run(10)
    assert [body.moved for body in answers] == [0]


def moved(answers: list[MigrationFinished]) -> list[tuple[MigrationOutcome, KvRefusal | None, str]]:
    return [(body.outcome, body.refusal, body.target) for body in answers]


def test_an_order_moves_a_sequence_to_the_named_target():
    world = BrokerWorld(filled("a", 1, 100), FakeInstance("b"), FakeInstance("c"), reasons=[])
    answers = world.ask_for("a", "ar0.0", target="c")
    world.run(100)
    assert moved(answers) == [(MigrationOutcome.MOVED, None, "c")]
    assert {body.reason for body in world.bodies(AskForMove)} == {MoveReason.ORDER}
    assert len(world.bodies(AskForMove)) == 1


@pytest.mark.parametrize("target", ["", "b"])
def test_an_order_to_recompute_needs_no_kv_that_can_move(target: str):
    source = filled("a", 1, 100)
    source.kv_moves = False
    world = BrokerWorld(source, FakeInstance("b", kv_moves=False), reasons=[])
    refused = world.ask_for("a", "ar0.0", target=target)
    world.run(10)
    assert moved(refused)[0][1] is KvRefusal.UNABLE
    answers = world.ask_for("a", "ar0.0", target=target, mode=MigrationMode.RECOMPUTE)
    world.run(100)
    assert moved(answers) == [(MigrationOutcome.MOVED, None, "b")]


def test_an_order_without_a_target_goes_where_there_is_room():
    world = BrokerWorld(filled("a", 1, 100), FakeInstance("b", blocks=5), FakeInstance("c"), reasons=[])
    answers = world.ask_for("a", "ar0.0")
    world.run(100)
    assert moved(answers) == [(MigrationOutcome.MOVED, None, "c")]


@pytest.mark.parametrize(
    ("target", "refusal"), [("a", KvRefusal.INVALID), ("nobody", KvRefusal.NO_TARGET), ("b", KvRefusal.NO_BLOCKS)]
)
def test_a_target_that_cannot_take_it_is_refused_with_the_reason(target: str, refusal: KvRefusal):
    world = BrokerWorld(filled("a", 1, 100), FakeInstance("b", blocks=5), reasons=[])
    answers = world.ask_for("a", "ar0.0", target=target)
    world.run(200)
    assert moved(answers) == [(MigrationOutcome.REFUSED, refusal, target)]


def test_one_that_waits_is_tried_until_its_time_is_over():
    waiting = {name: FakeSequence(prompt=100, state=SequenceState.WAITING) for name in ("w.0", "x.0")}
    world = BrokerWorld(FakeInstance("a", sequences=waiting), FakeInstance("b"), reasons=[])
    late, early = world.ask_for("a", "w.0", within_ms=3_000), world.ask_for("a", "w.0", within_ms=400)
    given_up = world.ask_for("a", "x.0", within_ms=400)
    world.run(1_000)
    assert late == early == [], "the second one waits with the first"
    assert [body.refusal for body in given_up] == [KvRefusal.NOT_RUNNING]
    waiting["w.0"].state, waiting["w.0"].since_ns = SequenceState.RUNNING, world.now_ns
    world.run(1_000)
    assert moved(late) == moved(early) == [(MigrationOutcome.MOVED, None, "b")]


def test_an_order_that_gets_no_bid_is_tried_until_its_time_is_over():
    world = BrokerWorld(filled("a", 2, 100), FakeInstance("b"), reasons=[])
    world.dead.add("b")
    answers, given_up = world.ask_for("a", "ar0.0", within_ms=2_000), world.ask_for("a", "ar1.0", within_ms=200)
    world.run(1_000)
    assert not answers
    assert [(body.refusal, body.detail) for body in given_up] == [(KvRefusal.UNANSWERED, "b: no answer")]
    world.dead.discard("b")
    world.run(500)
    assert moved(answers) == [(MigrationOutcome.MOVED, None, "b")]


@pytest.mark.parametrize(
    ("blocks", "refusal", "detail"), [(1_000, None, ""), (5, KvRefusal.NO_TARGET, "b: no_room, c: no answer")]
)
def test_an_order_takes_a_late_bid_and_says_who_gave_none(blocks: int, refusal: KvRefusal | None, detail: str):
    world = BrokerWorld(filled("a", 1, 100), FakeInstance("b", blocks=blocks), FakeInstance("c"), reasons=[])
    world.dead.add("c")
    world.tamper = arriving([300 * MS], MoveBid)
    answers = world.ask_for("a", "ar0.0", within_ms=400)
    world.run(600)
    (answer,) = answers
    assert (answer.target, answer.refusal) == ("" if refusal else "b", refusal)
    assert ", ".join(sorted(answer.detail.split(", "))) == detail


def test_those_with_a_place_are_asked_before_those_with_few_tokens_in_every_place():
    full = [filled(name, 64, 20) for name in "bcdefgh"]
    world = BrokerWorld(filled("a", 1, 100), *full, filled("i", 1, 20_000), reasons=[])
    answers = world.ask_for("a", "ar0.0")
    world.run(200)
    assert moved(answers) == [(MigrationOutcome.MOVED, None, "i")]


def test_two_targets_for_one_sequence_contradict_each_other():
    world = BrokerWorld(filled("a", 1, 100), FakeInstance("b"), FakeInstance("c"), reasons=[])
    first, second = world.ask_for("a", "ar0.0", target="b"), world.ask_for("a", "ar0.0", target="c")
    world.run(200)
    assert [body.refusal for body in (*first, *second)] == [None, KvRefusal.INVALID]


def test_what_cannot_be_carried_is_said_to_be_so():
    world = BrokerWorld(filled("a", 1, 100, immovable="a grammar"), FakeInstance("b"), reasons=[])
    answers = world.ask_for("a", "ar0.0")
    world.run(200)
    assert [(body.refusal, body.detail) for body in answers] == [(KvRefusal.IMMOVABLE, "a grammar")]


def test_who_asks_while_the_sequence_moves_hears_of_its_end():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), reasons=STANDING)
    world.transfer_ns = 500 * MS
    world.set_plan(plan((0, ["a"]), (1_000, ["b"])))
    while not world.moves:
        world.run(10)
    answers = world.ask_for("a", "ar0.0", target="b")
    world.run(1_000)
    assert moved(answers) == [(MigrationOutcome.MOVED, None, "b")]
    assert len(world.moves) == 1
