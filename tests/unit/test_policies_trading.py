"""Trading policies by table: what each offers, what a bid costs, which bid wins, and the stated cases."""

import msgspec
import pytest
from millrace.contracts.broker import LoadCurve, MoveReason
from millrace.policies.trading import TRADING_POLICIES, BurdenView, JoinView, TriggerView

from tests.unit.trading_views import MS, SECOND, bid, load, parameters, pick, sequence, trigger, unequal

NAMES = TRADING_POLICIES.names


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


def test_delay_takes_the_least_sum_of_delays_then_the_first_name():
    saving = {"gain_ns": 9 * SECOND, "stay_ns": 9 * SECOND}
    bids = (
        bid("b", burden_ns=2 * SECOND, rest_ns=1 * SECOND),
        bid("c", burden_ns=1 * SECOND, rest_ns=1 * SECOND),
        bid("d", burden_ns=0, rest_ns=2 * SECOND),
    )
    assert pick("delay", *bids, **saving) == "c"


@pytest.mark.parametrize(
    ("name", "value"), [("excess", float("inf")), ("margin_ms", -1), ("margin_share", float("nan")), ("offers_max", 0)]
)
def test_a_parameter_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(msgspec.ValidationError, match=name):
        parameters("delay", **{name: value})
