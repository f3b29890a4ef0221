"""Trading policies by table: what each offers, what a bid costs, which bid wins, and the stated cases."""

import msgspec
import pytest
from millrace.contracts.broker import LoadCurve, MoveReason
from millrace.policies.trading import (
    TRADING_POLICIES,
    BidView,
    BurdenView,
    JoinView,
    LoadView,
    MovableSequence,
    PickView,
    TriggerView,
)

MS = 1_000_000
SECOND = 1_000 * MS
NAMES = TRADING_POLICIES.names


def load(name: str, tokens: int, **fields) -> LoadView:
    return LoadView(name=name, tokens=tokens, blocks_free=1_000, blocks_total=2_000, **fields)


def sequence(name: str, tokens: int, rest: int | None = None) -> MovableSequence:
    return MovableSequence(sequence=name, tokens=tokens, output_tokens=1, blocks=-(-tokens // 16), rest_p50=rest)


def bid(name: str, **fields) -> BidView:
    return BidView(bidder=name, **{"burden_ns": 0, "load_tokens": 0, "blocks_idle": 100} | fields)


def parameters(name: str, **fields) -> msgspec.Struct:
    return msgspec.convert(fields, TRADING_POLICIES.load(name).parameters)


def trigger(name: str, view: TriggerView, *, state=None, now_ns: int = 0, **fields):
    policy = TRADING_POLICIES.load(name)
    return policy.trigger(view, parameters(name, **fields), policy.initial_state if state is None else state, now_ns)


def pick(name: str, *bids: BidView, reason: MoveReason = MoveReason.BALANCE, **fields) -> str | None:
    view = PickView(
        sequence=fields.pop("moved", sequence("r.0", 1_000)),
        reason=reason,
        own=fields.pop("own", load("a", 10_000)),
        bids=bids,
        gain_ns=fields.pop("gain_ns", 0),
        stay_ns=fields.pop("stay_ns", 0),
        cost_ns=fields.pop("cost_ns", 0),
    )
    return TRADING_POLICIES.load(name).pick(view, parameters(name, **fields)).chosen


def unequal(own: int = 10_000, **fields) -> TriggerView:
    """An instance with ``own`` tokens beside one with 2,000."""
    sequences = (sequence("r.0", 500), sequence("r.1", 3_000), sequence("r.2", 9_000))
    return TriggerView(own=load("a", own, **fields), peers=(load("b", 2_000),), sequences=sequences)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_offered_without_peers(name):
    alone = TriggerView(own=load("a", 10_000), peers=(), sequences=(sequence("r.0", 500),))
    assert trigger(name, alone)[0].offers == ()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reason", list(MoveReason))
def test_without_bids_nothing_moves(name, reason):
    assert pick(name, reason=reason) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reason", [each for each in MoveReason if each is not MoveReason.BALANCE])
def test_a_single_bid_wins_whoever_has_to_leave(name, reason):
    assert pick(name, bid("b", burden_ns=900 * SECOND, load_tokens=10**6), reason=reason) == "b"


def test_none_offers_nothing_however_unequal_the_loads_are():
    assert trigger("none", unequal())[0].offers == ()


def test_none_takes_the_bidder_with_most_idle_blocks():
    bids = (bid("c", blocks_idle=5), bid("b", blocks_idle=9), bid("a", blocks_idle=9))
    assert pick("none", *bids) == "a"


def test_cascade_offers_at_once_the_longest_that_do_not_exceed_the_excess():
    assert trigger("cascade", unequal())[0].offers == ("r.1", "r.0")


def test_cascade_offers_nothing_at_25_percent_above_the_mean_or_less():
    peers = (load("b", 6_000),)
    view = TriggerView(own=load("a", 10_000), peers=peers, sequences=(sequence("r.0", 500),))
    assert trigger("cascade", view)[0].offers == ()
    heavier = msgspec.structs.replace(view, own=load("a", 10_001))
    assert trigger("cascade", heavier)[0].offers == ("r.0",)


def test_cascade_counts_what_waits_and_what_is_to_come_as_demand():
    view = TriggerView(
        own=load("a", 1_000, waiting_tokens=6_000, queued_tokens=3_000),
        peers=(load("b", 2_000),),
        sequences=(sequence("r.0", 500),),
    )
    assert trigger("cascade", view)[0].offers == ("r.0",)


@pytest.mark.parametrize(
    ("bids", "chosen"),
    [
        # Half of one is that one; of two the lighter one; of three the two lighter ones.
        ([("b", 900, 0)], "b"),
        ([("b", 900, 0), ("c", 100, 50)], "c"),
        ([("b", 900, 0), ("c", 100, 50), ("d", 500, 0)], "c"),
        # Of those, the first to answer; starts only matter beyond three.
        ([("b", 1, 9), ("c", 2, 8), ("d", 3, 0), ("e", 9, 0), ("f", 9, 0), ("g", 9, 0)], "b"),
        # Four are lighter: the latest start drops out though it answered first.
        ([("b", 1, 9), ("c", 2, 8), ("d", 3, 0), ("e", 4, 1), *((name, 9, 0) for name in "fghi")], "c"),
    ],
)
def test_cascade_drops_the_loaded_half_keeps_three_earliest_and_takes_the_first(bids, chosen):
    views = [bid(name, load_tokens=tokens, start_ms=start) for name, tokens, start in bids]
    assert pick("cascade", *views) == chosen


def test_delay_offers_only_after_the_load_has_been_high_for_a_second():
    state = None
    for at_ms, offers in ((0, ()), (500, ()), (999, ()), (1_000, ("r.1", "r.0"))):
        answer, state = trigger("delay", unequal(), state=state, now_ns=at_ms * MS)
        assert answer.offers == offers, at_ms


def test_delay_begins_anew_when_the_load_was_level_in_between():
    _, state = trigger("delay", unequal(), now_ns=0)
    _, state = trigger("delay", unequal(own=2_000), state=state, now_ns=500 * MS)
    answer, _ = trigger("delay", unequal(), state=state, now_ns=1_100 * MS)
    assert answer.offers == ()


def test_delay_looks_at_the_load_to_come_and_not_at_the_present_one():
    falling = LoadCurve(step_ns=SECOND, tokens=[10_000, 0, 0, 0], blocks=[1, 0, 0, 0], running=[1, 0, 0, 0])
    answer, _ = trigger("delay", unequal(curve=falling), now_ns=0, persistence_ms=0)
    assert answer.offers == ()


def test_delay_offers_those_first_that_hold_many_tokens_for_long():
    sequences = (sequence("r.0", 2_000, rest=10), sequence("r.1", 500, rest=1_000), sequence("r.2", 3_000))
    view = TriggerView(own=load("a", 10_000), peers=(load("b", 2_000),), sequences=sequences)
    answer, _ = trigger("delay", view, persistence_ms=0)
    assert answer.offers == ("r.1", "r.0", "r.2")


def test_delay_bids_what_its_own_sequences_lose():
    view = BurdenView(
        own=load("b", 100),
        sequence=sequence("r.0", 10),
        reason=MoveReason.BALANCE,
        forecast=JoinView(others_delay_ns=7, rest_ns=99),
    )
    assert TRADING_POLICIES.load("delay").burden(view, parameters("delay")) == 7
    blind = msgspec.structs.replace(view, forecast=None)
    assert TRADING_POLICIES.load("delay").burden(blind, parameters("delay")) == 100


@pytest.mark.parametrize(
    ("gain", "stay", "burden", "rest", "cost", "chosen"),
    [
        # Seconds. 10 + 10 before, 1 + 8 after, cost 0.1: 10.9 are saved, the margin is the rest of 10.
        (10.0, 10.0, 1.0, 8.0, 0.1, "b"),
        # 9.5 saved is less.
        (10.0, 10.0, 0.5, 10.0, 0.0, None),
        # The absolute margin holds for short rests.
        (0.2, 0.1, 0.0, 0.1, 0.0, None),
        (0.3, 0.1, 0.0, 0.1, 0.0, "b"),
        # The cost of the move counts.
        (0.3, 0.1, 0.0, 0.1, 0.1, None),
        # It would run faster there, but others pay for it.
        (0.0, 10.0, 6.0, 5.0, 0.0, None),
    ],
)
def test_delay_moves_for_balance_only_what_saves_more_than_the_margin(gain, stay, burden, rest, cost, chosen):
    offer = bid("b", burden_ns=int(burden * SECOND), rest_ns=int(rest * SECOND), load_tokens=2_000)
    seconds = {"gain_ns": int(gain * SECOND), "stay_ns": int(stay * SECOND), "cost_ns": int(cost * SECOND)}
    assert pick("delay", offer, **seconds) == chosen


def test_delay_refuses_a_move_after_which_the_target_is_the_heavier_one():
    saving = {"gain_ns": 9 * SECOND, "stay_ns": SECOND}
    assert pick("delay", bid("b", load_tokens=8_999), **saving) == "b"
    assert pick("delay", bid("b", load_tokens=9_000), **saving) is None


def test_delay_takes_the_least_sum_of_delays_then_the_earliest_start():
    saving = {"gain_ns": 9 * SECOND, "stay_ns": 9 * SECOND}
    bids = (
        bid("b", burden_ns=2 * SECOND, rest_ns=1 * SECOND),
        bid("c", burden_ns=1 * SECOND, rest_ns=1 * SECOND, start_ms=9),
        bid("d", burden_ns=0, rest_ns=2 * SECOND, start_ms=8),
    )
    assert pick("delay", *bids, **saving) == "d"


@pytest.mark.parametrize("name", NAMES)
def test_scores_name_every_bid(name):
    policy = TRADING_POLICIES.load(name)
    view = PickView(
        sequence=sequence("r.0", 10), reason=MoveReason.DRAIN, own=load("a", 10), bids=(bid("b"), bid("c"), bid("d"))
    )
    decision = policy.pick(view, policy.parameters())
    assert sorted(score.name for score in decision.scores) == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cascade", {"excess": -0.1}),
        ("cascade", {"excess": float("nan")}),
        ("cascade", {"earliest": 0}),
        ("cascade", {"offers_max": 0}),
        ("delay", {"excess": float("inf")}),
        ("delay", {"persistence_ms": -1}),
        ("delay", {"margin_ms": -1}),
        ("delay", {"margin_share": float("nan")}),
        ("delay", {"offers_max": 0}),
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused_by_name(name, fields):
    with pytest.raises(msgspec.ValidationError, match=next(iter(fields))):
        parameters(name, **fields)


def short_of_memory(**fields) -> TriggerView:
    """One instance with 2 idle blocks per sequence beside a rich one and one that is poorer still."""
    own = LoadView(name="a", tokens=30_000, running=10, blocks_free=20, blocks_total=2_000)
    poorer = LoadView(name="b", tokens=30_000, running=10, blocks_free=5, blocks_total=2_000)
    rich = [LoadView(name=name, tokens=8_000, running=10, blocks_free=1_500, blocks_total=2_000) for name in ("c", "d")]
    sequences = (sequence("r.0", 900), sequence("r.1", 300))
    return TriggerView(own=own, peers=(poorer, *rich[: fields.pop("rich", 2)]), sequences=sequences)


def test_llumnix_offers_its_shortest_sequence_to_the_target_of_its_rank():
    answer, _ = trigger("llumnix", short_of_memory())
    assert answer.offers == ("r.1",)
    assert "at c" in answer.reason or "at d" in answer.reason
    # The only rich instance is for the poorer one.
    assert trigger("llumnix", short_of_memory(rich=1))[0].offers == ()


def test_llumnix_moves_nothing_above_its_threshold_or_where_the_gap_would_turn_round():
    level = TriggerView(
        own=LoadView(name="a", tokens=30_000, running=2, blocks_free=4, blocks_total=2_000),
        peers=(LoadView(name="b", tokens=30_000, running=2, blocks_free=7, blocks_total=2_000),),
        sequences=(sequence("r.0", 800),),
    )
    assert trigger("llumnix", level)[0].offers == ()
    assert trigger("llumnix", short_of_memory(), freeness=1.5)[0].offers == ()


def test_llumnix_takes_the_bid_with_most_idle_memory_if_that_is_more_than_here():
    poor = load("a", 10_000)
    assert pick("llumnix", bid("b", blocks_idle=1_100), bid("c", blocks_idle=1_200), own=poor) == "c"
    assert pick("llumnix", bid("b", blocks_idle=900), own=poor) is None
    assert pick("llumnix", bid("b", blocks_idle=900), own=poor, reason=MoveReason.DRAIN) == "b"


def test_reactive_offers_what_levels_the_present_loads_best_and_asks_nothing_about_the_rest():
    view = unequal()
    assert trigger("reactive", view)[0].offers == ("r.1",)  # 3,000 of 8,000 too many; 9,000 would turn them round
    known = tuple(msgspec.structs.replace(each, rest_p50=1) for each in view.sequences)
    assert trigger("reactive", msgspec.structs.replace(view, sequences=known))[0].offers == ("r.1",)


def test_reactive_offers_below_its_threshold_where_memory_is_nearly_full():
    full = LoadView(name="a", tokens=2_050, blocks_free=10, blocks_total=2_000)
    view = TriggerView(own=full, peers=(load("b", 2_000),), sequences=(sequence("r.0", 20), sequence("r.1", 900)))
    assert trigger("reactive", view)[0].offers == ("r.0",)
    assert trigger("reactive", msgspec.structs.replace(view, own=load("a", 2_050)))[0].offers == ()


def test_reactive_does_not_offer_what_the_lightest_peer_has_no_room_for():
    light = LoadView(name="b", tokens=2_000, blocks_free=100, blocks_total=2_000)
    view = TriggerView(own=load("a", 10_000), peers=(light,), sequences=(sequence("r.0", 500), sequence("r.1", 3_000)))
    assert trigger("reactive", view)[0].offers == ("r.0",)


def test_reactive_moves_to_the_lightest_bidder_where_the_larger_load_falls():
    bids = bid("b", load_tokens=4_000), bid("c", load_tokens=3_000)
    assert pick("reactive", *bids) == "c"
    assert pick("reactive", *bids, moved=sequence("r.0", 8_000)) is None
