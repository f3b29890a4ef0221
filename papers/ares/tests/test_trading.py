"""ARES between brokers, by table: what is offered, what a bidder says, which bid wins."""

from __future__ import annotations

from statistics import pvariance
from typing import Any

import msgspec
import numpy as np
import pytest
from millrace.contracts.broker import LoadCurve, MoveReason
from millrace.policies.trading import BidView, BurdenView, LoadView, MovableSequence, PickView, TriggerView

from papers.ares.trading import Parameters, State, burden, pick, tokens_over_horizon, trigger

SECOND = 1_000_000_000
POINTS = 5


def load(name: str, *tokens: float, blocks: int = 1_000, used: int = 0, **fields: Any) -> LoadView:
    """An instance whose tokens are forecast at one-second steps; ten tokens a second of each of its ten sequences."""
    told = [int(value) for value in tokens] if len(tokens) > 1 else [int(tokens[0])] * POINTS
    curve = LoadCurve(step_ns=SECOND, tokens=told, blocks=[used] * len(told), running=[10] * len(told))
    known = {"running": 10, "tokens_per_s": 100.0, "blocks_free": blocks - used, "blocks_total": blocks, "curve": curve}
    return LoadView(name=name, tokens=told[0], **{**known, **fields})


def sequence(name: str, tokens: int, rest: int | None = 1_000) -> MovableSequence:
    return MovableSequence(sequence=name, tokens=tokens, output_tokens=9, blocks=-(-tokens // 16), rest_p50=rest)


def offers(own: LoadView, peers: tuple[LoadView, ...], *sequences: MovableSequence, **fields: Any) -> tuple[str, ...]:
    view = TriggerView(own=own, peers=peers, sequences=sequences)
    return trigger(view, Parameters(**fields), State(), 0)[0].offers


def decided(*bids: BidView, own: LoadView, moved: MovableSequence, **fields: Any) -> Any:
    wanted = {"reason": MoveReason.BALANCE, "stay_ns": 60 * SECOND, "cost_ns": SECOND, **fields}
    return pick(PickView(sequence=moved, own=own, bids=bids, **wanted), Parameters())


def bid(name: str, tokens: int, **fields: Any) -> BidView:
    return BidView(bidder=name, **{"burden_ns": tokens, "load_tokens": tokens, "blocks_idle": 9, **fields})


def test_a_sequence_grows_until_its_predicted_end() -> None:
    grown = tokens_over_horizon(sequence("a", 100, rest=25), load("x", 1), 5)
    assert grown.tolist() == [100, 110, 120, 0, 0]


def test_it_offers_what_would_lower_the_variance_most() -> None:
    own, peers = load("a", 10_000), (load("b", 4_000), load("c", 8_000))
    sequences = [sequence(f"s{tokens}", tokens) for tokens in (500, 2_900, 5_900)]
    assert offers(own, peers, *sequences) == ("s2900",)
    best = {each.sequence: _variance_after(own, peers[0], peers[1], each) for each in sequences}
    assert min(best, key=lambda name: best[name]) == "s2900"


def _variance_after(source: LoadView, target: LoadView, other: LoadView, moved: MovableSequence) -> float:
    beta = [0.9**point for point in range(POINTS)]
    grown = tokens_over_horizon(moved, source, POINTS).tolist()
    curves = [view.curve.tokens for view in (source, target, other) if view.curve is not None]
    points = range(POINTS)
    return sum(
        beta[t] * pvariance([curves[0][t] - grown[t], curves[1][t] + grown[t], float(curves[2][t])]) for t in points
    )


@pytest.mark.parametrize(
    ("own", "peers", "why"),
    [
        (load("a", 10_000), (), "no peers"),
        (load("a", 10_000), (load("b", 9_500),), "within theta"),
        (load("a", 10_000, 0, 0, 0, 0), (load("b", 4_000),), "its load is about to end"),
        (load("a", 10_000), (load("b", 100, used=990),), "no memory there"),
        (load("a", 10_000), (load("b", 100, queued_tokens=15_500),), "promised already"),
    ],
)
def test_it_offers_nothing_where_no_move_would_help(own: LoadView, peers: tuple[LoadView, ...], why: str) -> None:
    assert offers(own, peers, sequence("s", 2_000)) == (), why


def test_memory_counts_the_growth_of_both_at_every_point() -> None:
    peer = load("b", 1_000, blocks=200)
    growing = LoadCurve(step_ns=SECOND, tokens=[1_000] * 5, blocks=[10, 60, 110, 160, 190], running=[10] * 5)
    assert offers(load("a", 10_000), (peer,), sequence("s", 1_000)) == ("s",)
    assert offers(load("a", 10_000), (msgspec.structs.replace(peer, curve=growing),), sequence("s", 1_000)) == ()
    ends_before = sequence("s", 1_000, rest=15)
    assert offers(load("a", 10_000), (msgspec.structs.replace(peer, curve=growing),), ends_before) == ("s",)


def test_a_sequence_whose_rest_nobody_predicts_stays() -> None:
    assert offers(load("a", 10_000), (load("b", 1_000),), sequence("s", 2_000, rest=None)) == ()


def test_the_future_decides_and_not_the_present() -> None:
    own, peer = load("a", 4_000, 6_000, 8_000, 10_000, 12_000), load("b", 4_500, 3_000, 1_000, 0, 0)
    assert offers(own, (peer,), sequence("s", 2_000)) == ("s",)


def test_without_curves_present_demands_are_compared() -> None:
    own, peer = load("a", 10_000, curve=None), load("b", 1_000, curve=None)
    assert offers(own, (peer,), sequence("s", 2_000)) == ("s",)


def test_a_bidder_says_what_it_will_carry_while_the_sequence_is_there() -> None:
    own = load("b", 1_000, 2_000, 50_000, 50_000, 50_000)
    asked = BurdenView(own=own, sequence=sequence("s", 100, rest=15), reason=MoveReason.BALANCE, asker=load("a", 9))
    beta = np.array([1.0, 0.9]) * [100, 110]
    assert burden(asked, Parameters()) == round(float(beta @ [1_000, 2_000] / beta.sum()))


def test_the_lightest_bid_wins_if_the_variance_falls() -> None:
    own, moved = load("a", 10_000), sequence("s", 2_000)
    assert decided(bid("b", 6_000), bid("c", 5_000), own=own, moved=moved).chosen == "c"
    assert decided(bid("b", 7_900), own=own, moved=moved).chosen == "b"
    assert decided(bid("b", 8_000), own=own, moved=moved).chosen is None


def test_the_source_and_a_bidder_agree_on_when_the_variance_falls() -> None:
    rng = np.random.default_rng(1)
    beta = 0.9 ** np.arange(POINTS)
    moves = 0
    for _ in range(300):
        source, target = rng.integers(0, 9_000, POINTS), rng.integers(0, 9_000, POINTS)
        own, other = load("a", *source), load("b", *target)
        moved = sequence("s", int(rng.integers(1, 3_000)), rest=int(rng.integers(1, 60)))
        asked = BurdenView(own=other, sequence=moved, reason=MoveReason.BALANCE, asker=own)
        grown = tokens_over_horizon(moved, own, POINTS)
        change = float(beta @ ((source - grown) ** 2 + (target + grown) ** 2 - source**2 - target**2))
        said = burden(asked, Parameters())
        if abs(change) <= 2 * float(beta @ grown):
            continue  # within the rounding of the bid to a token
        assert (decided(bid("b", said), own=own, moved=moved).chosen == "b") == (change < 0)
        moves += change < 0
    assert moves > 50


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stay_ns": SECOND, "cost_ns": SECOND}, "ends before"),
        ({"stay_ns": 0, "cost_ns": 101 * SECOND}, "ends before"),
    ],
)
def test_a_sequence_that_ends_before_the_move_pays_stays(fields: dict[str, int], reason: str) -> None:
    said = decided(bid("b", 0), own=load("a", 10_000), moved=sequence("s", 100), **fields)
    assert said.chosen is None
    assert reason in said.reason


def test_who_would_preempt_takes_nothing_for_balance_but_whoever_must_leave() -> None:
    full = bid("b", 10, preemptions=1)
    assert decided(full, own=load("a", 10_000), moved=sequence("s", 100)).chosen is None
    leaving = decided(full, own=load("a", 10_000), moved=sequence("s", 100), reason=MoveReason.DRAIN)
    assert leaving.chosen == "b"


@pytest.mark.parametrize(
    "fields", [{"theta": -0.1}, {"decay": 0.0}, {"memory": 1.1}, {"margin": float("nan")}, {"offers_max": 0}]
)
def test_a_parameter_that_makes_no_sense_is_refused_by_name(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Parameters(**fields)  # type: ignore[arg-type]
