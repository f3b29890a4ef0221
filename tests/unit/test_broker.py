"""Brokers move sequences: who asks whom for what, which fences hold, what bids and awards are."""

from itertools import pairwise

import pytest
from millrace.contracts.broker import AskForMove, BidRefusal, LoadReported, LoadsReported, MoveBid, MoveReason
from millrace.contracts.kv import KvRefusal
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import SequenceState
from millrace.contracts.worker import ReturnSequences

from services.broker.bids import BIDS_MAX
from tests.unit.broker_rig import EAGER, MS, SECOND, START_NS, BrokerWorld, FakeInstance, FakeSequence, filled, plan

STANDING = [MoveReason.DRAIN, MoveReason.HANDOFF, MoveReason.BOUNDARY]


def reasons(world: BrokerWorld) -> set[str]:
    return {str(body.reason) for body in world.bodies(AskForMove)}


def test_an_overloaded_instance_gives_away_until_it_is_level():
    world = BrokerWorld(filled("a", 6, 1_000), FakeInstance("b"), FakeInstance("c"))
    world.run(10_000)
    assert [len(each.sequences) for each in world.instances.values()] == [2, 2, 2]
    assert reasons(world) == {"balance"}
    assert world.quiet()


@pytest.mark.parametrize("policy", [EAGER, "delay"])
def test_level_instances_leave_each_other_alone(policy):
    world = BrokerWorld(filled("a", 3, 1_000), filled("b", 3, 1_000), policy=policy)
    world.run(5_000)
    assert world.bodies(AskForMove) == []


def test_delay_moves_what_shortens_the_sum_of_times():
    world = BrokerWorld(
        filled("a", 8, 1_000, expected=2_000, final=2_000),
        FakeInstance("b"),
        policy="delay",
        parameters={"margin_share": 0.05},
    )
    world.run(10_000)
    assert len(world.instances["b"].sequences) == 3  # five against three are 25 % above the mean, and stay
    assert all(bid.rest_ns > 0 for bid in world.bodies(MoveBid))


def test_no_reason_that_is_off_moves_anything():
    world = BrokerWorld(filled("a", 6, 1_000), FakeInstance("b"), reasons=[MoveReason.HANDOFF])
    world.instances["a"].draining = True
    world.run(4_000)
    assert world.moves == []


def test_a_prefill_instance_hands_off_to_those_that_decode():
    world = BrokerWorld(filled("a", 4, 500), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    roles = {"a": InstanceRole.PREFILL, "b": InstanceRole.DECODE}
    world.set_plan(plan((0, ["a", "b", "c"]), roles=roles))
    world.run(8_000)
    assert sorted(world.instances["b"].sequences) == ["ar0.0", "ar1.0", "ar2.0", "ar3.0"]
    assert reasons(world) == {"handoff"}


def test_hand_offs_wait_for_no_tick():
    """Moves of 50 ms follow each other where three places are free, and newcomers leave when they are seen."""
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"), reasons=STANDING, tick_ms=400)
    world.set_plan(plan((0, ["a", "b"]), roles={"a": InstanceRole.PREFILL, "b": InstanceRole.DECODE}))
    world.run(1_000)
    world.instances["a"].sequences |= filled("a", 18, 500).sequences
    world.run(500)  # a snapshot each 100 ms; in ticks it would be two times three
    assert len(world.instances["b"].sequences) == 18


def test_a_sequence_that_outgrows_its_stage_goes_to_the_next_one():
    world = BrokerWorld(filled("a", 1, 700), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    world.set_plan(plan((0, ["a", "b"]), (1_000, ["c"])))
    world.run(15_000)
    (at_ns, _, source, target) = world.moves[0]
    assert (source, target) == ("a", "c")
    # 290 tokens more at 100 a second.
    assert 2 * SECOND < at_ns - START_NS < 4 * SECOND


def test_a_sequence_that_has_moved_is_not_offered_again_on_the_word_of_an_old_snapshot():
    world = BrokerWorld(filled("a", 6, 4_000), FakeInstance("b"), reasons=STANDING, tick_ms=10)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"])))
    world.run(3_000)
    assert sorted(sequence for _, sequence, _, _ in world.moves) == [f"ar{index}.0" for index in range(6)]


def test_a_stage_that_lost_everybody_is_covered_by_the_next_longer_one():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), (4_000, ["c"])))
    world.unregister("b")
    world.run(3_000)
    assert [target for _, _, _, target in world.moves] == ["c"]


def test_a_sequence_stays_where_no_longer_stage_has_anybody():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), reasons=STANDING)
    world.set_plan(plan((0, ["b"]), (500, ["a"]), (1_000, [])))
    world.run(3_000)
    assert world.moves == []


def test_a_drain_goes_before_balance_and_uses_the_own_stage_first():
    world = BrokerWorld(filled("a", 3, 100), FakeInstance("b"), FakeInstance("c"), settle=False)
    world.instances["a"].draining = True
    world.set_plan(plan((0, ["a", "b"]), (1_000, ["c"])))
    world.run(4_000)
    assert len(world.instances["b"].sequences) == 3
    assert reasons(world) == {"drain"}


MEMORY = [MoveReason.MEMORY]


def crowded(blocks: int, **fields: int) -> FakeInstance:
    """Four sequences of 400 tokens, 25 blocks each now and together growing by 25 a second."""
    instance = filled("a", 4, 390, **fields)
    instance.blocks = blocks
    return instance


@pytest.mark.parametrize("policy", [EAGER, "delay", "none"])
def test_a_risk_of_running_short_sends_somebody_away_whatever_the_policy_forecasts(policy):
    world = BrokerWorld(crowded(150, token_ns=10 * MS), FakeInstance("b"), policy=policy, reasons=MEMORY)
    world.run(500)
    assert world.moves == [], "with 25 blocks to spare nothing is at risk for a second"
    world.run(2_000)
    assert reasons(world) == {"memory"}
    assert len(world.instances["a"].sequences) < 4
    held = sum(status.blocks for status in world.instances["a"].statuses(world.now_ns))
    assert held <= 150


def test_sequences_that_end_soon_put_nothing_at_risk():
    ending = crowded(106, expected=14, p90=15, at=10, final=14)
    world = BrokerWorld(ending, FakeInstance("b"), policy="none", reasons=MEMORY, settle=False)
    world.run(100)
    assert world.bodies(AskForMove) == []


@pytest.mark.parametrize(("join_risk_max", "prompt", "taken"), [(1.0, 300, True), (0.05, 300, False), (0.05, 16, True)])
def test_a_hand_off_waits_where_it_is_while_those_that_decode_may_run_short(join_risk_max, prompt, taken):
    """The decoding instance has 40 blocks to spare; its four sequences need 32 more within 1.25 s."""
    arriving = FakeInstance("b", sequences={"h.0": FakeSequence(prompt=prompt, token_ns=10_000 * MS)})
    memory = {"join_risk_max": join_risk_max, "join_horizon_ms": 1_250}
    crowd = crowded(140, token_ns=10_000 * MS)
    world = BrokerWorld(crowd, arriving, policy="none", reasons=[MoveReason.HANDOFF], memory=memory)
    world.set_plan(plan((0, ["a", "b"]), roles={"b": InstanceRole.PREFILL, "a": InstanceRole.DECODE}))
    world.run(1_500)
    assert [move[1:] for move in world.moves] == ([("h.0", "b", "a")] if taken else [])
    refused = {body.refusal for body in world.bodies(MoveBid)}
    assert refused == ({None} if taken else {BidRefusal.NO_ROOM})


def test_a_memory_that_is_too_small_is_told_with_the_load():
    world = BrokerWorld(crowded(108, immovable="a grammar"), FakeInstance("b"), policy="none", reasons=MEMORY)
    world.run(1_000)
    told = [load.memory_risk for load in loads(world, "a")]
    assert told[-1] > 0.05
    assert {load.memory_risk for load in loads(world, "b")} == {0.0}


def test_the_ninetieth_percentile_travels_with_the_ask():
    world = BrokerWorld(filled("a", 1, 100, expected=300, p90=900, at=5), FakeInstance("b"), reasons=STANDING)
    world.instances["a"].draining = True
    world.run(500)
    ask = world.bodies(AskForMove)[0]
    assert ask.rest_p90 == ask.rest_p50 + 600


def test_a_sequence_moves_three_times_for_balance_and_no_more():
    world = BrokerWorld(filled("a", 1, 4_000), FakeInstance("b"), fences={"cooldown_ms": 0, "cooldown_tokens": 0})
    for turn in range(12):
        here = world.where("ar0.0")[0]
        world.instances[here].sequences[f"weight{turn}.0"] = FakeSequence(prompt=6_000, immovable="a test's weight")
        world.run(4_000)
        for each in world.instances.values():
            each.sequences = {name: s for name, s in each.sequences.items() if not name.startswith("weight")}
    assert len(world.moves) == 3


def test_a_sequence_that_has_moved_stays_for_a_while_and_64_tokens():
    world = BrokerWorld(filled("a", 1, 4_000), FakeInstance("b"), FakeInstance("c"))
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), (2_000, ["c"]), epoch=1))
    world.run(1_000)
    first_ns = world.moves[0][0]
    assert world.moves[0][3] == "c"
    # The plan changes under it: the third stage begins later now, c's stage has ended below its length.
    world.set_plan(plan((0, ["a"]), (1_000, ["c"]), (2_000, ["b"]), epoch=2))
    world.run(8_000)
    second_ns = next(at_ns for at_ns, _, source, _ in world.moves if source == "c")
    assert second_ns - first_ns >= 2 * SECOND


def test_a_last_move_that_took_long_keeps_nobody_past_a_boundary_for_five_seconds():
    world = BrokerWorld(filled("a", 1, 4_000), FakeInstance("b"), FakeInstance("c"))
    world.transfer_ns = SECOND
    world.set_plan(plan((0, ["a"]), (1_000, ["b"]), (2_000, ["c"]), epoch=1))
    world.run(2_000)
    assert world.where("ar0.0") == ["c"]
    world.set_plan(plan((0, ["a"]), (1_000, ["c"]), (2_000, ["b"]), epoch=2))
    world.run(5_000)
    assert [target for _, _, _, target in world.moves] == ["c", "b"]


def test_a_sequence_without_a_prediction_moves_for_balance_only_after_64_tokens():
    young = filled("a", 6, 1_000, output=1, token_ns=50 * MS)
    world = BrokerWorld(young, FakeInstance("b"))
    world.run(1_500)
    assert world.moves == []
    world.run(3_000)
    assert world.moves


def test_nothing_balances_for_two_seconds_after_a_new_plan():
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"))
    world.instances["a"].sequences = filled("a", 6, 1_000).sequences
    world.set_plan(plan((0, ["a", "b"])))
    world.run(1_900)
    assert world.bodies(AskForMove) == []
    world.run(1_500)
    assert world.bodies(AskForMove)


def test_what_cannot_be_carried_or_does_not_decode_is_not_asked_for():
    sequences = {
        "i.0": FakeSequence(prompt=1_000, immovable="structured output"),
        "w.0": FakeSequence(prompt=1_000, state=SequenceState.PREEMPTED),
    }
    world = BrokerWorld(FakeInstance("a", sequences=sequences), FakeInstance("b"))
    world.instances["a"].draining = True
    world.run(3_000)
    assert world.bodies(AskForMove) == []


QUEUED = [SequenceState.WAITING, SequenceState.PREEMPTED]


def queueing(count: int = 2) -> FakeInstance:
    """One sequence runs; others wait, in turn new and preempted."""
    instance = filled("a", 1, 100)
    for index in range(count):
        instance.sequences[f"q{index}.0"] = FakeSequence(prompt=500, state=QUEUED[index % 2])
    return instance


def returned(world: BrokerWorld) -> list[str]:
    return [name for body in world.bodies(ReturnSequences) for name in body.sequences]


def test_what_waits_at_an_instance_that_drains_is_handed_back_and_never_moved():
    world = BrokerWorld(queueing(), FakeInstance("b"))
    world.instances["a"].draining = True
    world.run(900)
    assert sorted(returned(world)) == ["q0.0", "q1.0"]
    assert {sequence for _, sequence, _, _ in world.moves} == {"ar0.0"}
    assert world.metrics["a"].returned == 2


def test_it_is_asked_back_again_where_the_message_was_lost():
    world = BrokerWorld(queueing(1), FakeInstance("b"))
    world.instances["a"].draining = True
    world.run(2_900)
    assert returned(world) == ["q0.0"] * 3


@pytest.mark.parametrize(("others", "draining"), [([], True), ([FakeInstance("b")], False)])
def test_nothing_is_handed_back_where_nobody_else_could_take_it_or_nothing_drains(others, draining):
    world = BrokerWorld(queueing(3), *others)
    world.instances["a"].draining = draining
    world.run(3_000)
    assert returned(world) == []


def test_the_order_tells_stage_length_rest_bids_and_why():
    world = BrokerWorld(filled("a", 1, 1_100, expected=3_000), FakeInstance("b"), FakeInstance("c", blocks=20))
    world.set_plan(plan((0, ["a"]), (1_000, ["b", "c"])))
    notes: list[str] = []
    migrate = world._migrate
    world._migrate = lambda source, body, answer: notes.append(body.note) or migrate(source, body, answer)  # type: ignore[method-assign]
    world.run(1_500)
    (note,) = notes
    assert note.startswith("boundary: 1220 tokens, stage s0 ends at 1000; ")
    for part in ("tokens expected to come", "asked 2", "b 0 s, 0 tokens", "c no_room", "first to answer of 1"):
        assert part in note


def test_candidates_are_the_three_that_carry_least():
    others = [filled(f"b{index}", 6 - index, 900) for index in range(6)]
    world = BrokerWorld(filled("a", 30, 900), *others)
    world.run(600)
    first = world.bodies(AskForMove)[0].ask
    asked = {s.rpartition(".")[2] for _, s, _, body in world.said if isinstance(body, AskForMove) and body.ask == first}
    assert asked == {"b3", "b4", "b5"}


def test_what_is_awarded_at_a_time_is_bounded_at_the_source():
    world = BrokerWorld(filled("a", 12, 2_000), FakeInstance("b"), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"])))
    world.transfer_ns = 700 * MS
    out = 0
    for _ in range(60):
        world.run(100)
        out = max(out, len(world.open("a", "out")))
    assert out == 3
    assert len(world.instances["b"].sequences) == 12


def test_more_leave_at_a_time_where_an_instance_drains_and_moves_do_not_wait_for_the_wire():
    world = BrokerWorld(filled("a", 30, 100), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    world.transfer_ns = 400 * MS
    world.instances["a"].draining = True
    out = 0
    for _ in range(60):
        world.run(100)
        out = max(out, len(world.open("a", "out")))
    assert out == 8
    assert not world.instances["a"].sequences


def test_a_bid_holds_blocks_until_its_deadline():
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b", blocks=20))
    heard(world, "ask.m.b", ask_of(blocks=12), "broker-a")
    heard(world, "ask.m.b", ask_of(ask="second", sequence="y.0", blocks=12), "broker-a")
    assert [body.refusal for body in world.bodies(MoveBid)] == [None, BidRefusal.NO_ROOM]
    world.run(500)
    heard(world, "ask.m.b", ask_of(ask="third", sequence="z.0", blocks=12), "broker-a")
    assert world.bodies(MoveBid)[-1].refusal is None


def test_no_more_bids_hold_than_are_taken():
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"))
    for index in range(BIDS_MAX + 1):
        heard(world, "ask.m.b", ask_of(ask=f"ask-{index}", sequence=f"x{index}.0"), "broker-a")
    assert [body.refusal for body in world.bodies(MoveBid)] == [None] * BIDS_MAX + [BidRefusal.FULL]


def test_a_target_that_refuses_its_award_is_followed_by_the_next_best_bid():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b", "c"])))
    world.refuse["b"] = KvRefusal.NO_BLOCKS
    world.run(1_500)
    assert [target for _, _, _, target in world.moves] in (["b", "c"], ["c"])
    assert world.where("ar0.0") == ["c"]
    assert len({body.ask for body in world.bodies(AskForMove)}) == 1


def test_a_bid_that_is_over_is_not_awarded():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b", "c"])))
    world.refuse = {"b": KvRefusal.NO_BLOCKS, "c": KvRefusal.NO_BLOCKS}
    world.transfer_ns = 600 * MS
    world.run(1_500)
    first = world.bodies(AskForMove)[0].ask
    assert len(world.moves) >= 1
    (_, _, _, first_target) = world.moves[0]
    assert [t for at, _, _, t in world.moves if at < world.moves[0][0] + 600 * MS] == [first_target], first


def test_a_refusal_that_concerns_the_sequence_ends_the_ask():
    world = BrokerWorld(filled("a", 1, 2_000), FakeInstance("b"), FakeInstance("c"), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b", "c"])))
    world.refuse = {"b": KvRefusal.EPOCH_REFUSED, "c": KvRefusal.EPOCH_REFUSED}
    world.run(300)
    assert len(world.moves) == 1
    assert world.open("a", "out") == {}


def loads(world: BrokerWorld, instance: str) -> list[LoadReported]:
    return [load for body in world.bodies(LoadsReported) for load in body.loads if load.instance == instance]


def why(world: BrokerWorld, instance: str = "a") -> str:
    return loads(world, instance)[-1].why


def test_a_broker_that_sees_no_gain_asks_nobody_and_says_so():
    """The others would gain, but by less than the sequence itself still runs: the policy wants more."""
    world = BrokerWorld(filled("a", 8, 1_000, expected=2_000, final=2_000), filled("b", 4, 1_000), policy="delay")
    world.run(4_000)
    assert world.bodies(AskForMove) == []
    assert "no gain" in why(world)
    assert "would save" in why(world)


def test_asking_in_vain_for_balance_comes_ever_later():
    world = BrokerWorld(filled("a", 6, 1_000), FakeInstance("b"), settle=False)
    world.tamper = lambda subject, body: [] if isinstance(body, MoveBid) else [200_000]
    world.run(20_000)
    asked_ns = [at_ns for at_ns, _, _, body in world.said if isinstance(body, AskForMove)]
    gaps = [later - sooner for sooner, later in pairwise(asked_ns)]
    assert len(asked_ns) <= 6
    assert all(later > sooner for sooner, later in pairwise(gaps))


def test_what_finds_no_room_is_named_with_the_load():
    world = BrokerWorld(filled("a", 2, 2_000), FakeInstance("b", blocks=16), reasons=STANDING)
    world.set_plan(plan((0, ["a"]), (1_000, ["b"])))
    world.run(3_000)
    assert why(world).startswith("boundary: 0 of 2 are asked for or move; 2 wait")


def ask_of(**changes) -> AskForMove:
    about = {"ask": "feed", "sequence": "x.0", "model": "m", "source": "a", "plan_epoch": -1}
    size = {"prompt_tokens": 100, "output_tokens": 10, "blocks": 7, "max_tokens": 100}
    return AskForMove(**{"reason": MoveReason.BALANCE} | about | size | changes)


def heard(world: BrokerWorld, subject: str, body, sender: str) -> list:
    answers: list = []
    world.tell(f"mr.test.{subject}", body, sender, answers.append)
    world.run(5)
    return answers


@pytest.mark.parametrize("changes", [{"model": "other"}, {"source": "b"}])
def test_an_ask_of_another_model_or_of_its_own_instance_gets_no_bid(changes):
    world = BrokerWorld(FakeInstance("a"), FakeInstance("b"))
    sender = "broker-b" if changes.get("source") == "b" else "broker-a"
    heard(world, "ask.m.b", ask_of(**changes), sender)
    assert [body.refusal for body in world.bodies(MoveBid)] == [BidRefusal.INVALID]


def test_a_bid_of_somebody_who_was_not_asked_is_refused():
    world = BrokerWorld(filled("a", 4, 1_000), FakeInstance("b"), FakeInstance("c", draining=True), settle=False)
    world.tamper = lambda subject, body: [] if isinstance(body, MoveBid) and body.bidder == "b" else [1_000]
    while not world.bodies(AskForMove):
        world.run(5)
    ask = world.bodies(AskForMove)[0]
    about = {"ask": ask.ask, "sequence": ask.sequence, "plan_epoch": ask.plan_epoch}
    forged = MoveBid(source="a", bidder="c", burden_ns=0, load_tokens=0, blocks_idle=10**6, **about)
    heard(world, "bid.a.c", forged, "broker-c")
    world.run(100)
    assert world.refused("a")["unasked_bid"] == 1
    assert world.moves == []
