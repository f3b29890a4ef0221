"""Moves what shortens the sum of all sequences' times, by simulation of both sides.

A balance move must relieve more at the source than it causes at the target, its own cost and a margin included. What
is offered is drawn from an instance that is forecast to carry more than its peers and has been for some time.
"""

from __future__ import annotations

import msgspec

from millrace.contracts.broker import MoveReason
from millrace.contracts.observers import CandidateScore
from millrace.policies.trading.view import (
    BidView,
    BurdenView,
    PickDecision,
    PickView,
    Trigger,
    TriggerView,
    fitting,
    maximum_falls,
    mean_over_horizon,
)

_MS = 1_000_000

needs_forecast = True


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions for an offer, and the gain that a move needs.

    Attributes:
        excess: An instance offers where its forecast load exceeds the mean of its set by this share; at least 0.
        persistence_ms: And has done so for this long without a break; at least 0.
        margin_ms: Time that a balance move must save in all, beyond its cost; at least 0.
        margin_share: And as a share of the time that the sequence would still run; at least 0. Forecasts leave out
            arrivals, which go where tokens have become fewer and undo most of what a move relieves: less than a second
            saved for each second that it would still run is not told from nothing.
        offers_max: Sequences whose leaving is simulated at a time; at least 1.
    """

    excess: float = 0.25
    persistence_ms: int = 1_000
    margin_ms: int = 250
    margin_share: float = 1.0
    offers_max: int = 8

    def __post_init__(self) -> None:
        for field, least in (("excess", 0), ("persistence_ms", 0), ("margin_ms", 0), ("margin_share", 0)):
            if not least <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field} must be at least {least} and finite, is {getattr(self, field)}")
        if self.offers_max < 1:
            raise ValueError(f"offers_max must be at least 1, is {self.offers_max}")


class State(msgspec.Struct, frozen=True):
    """Attributes: since_ns: since when the load has been above the threshold; None while it is not."""

    since_ns: int | None = None


def trigger(view: TriggerView, parameters: Parameters, state: State, now_ns: int) -> tuple[Trigger, State]:
    """Offers where the forecast load has been above the mean for long enough; nothing without peers.

    Those that hold many tokens for a long time come first: leaving, they relieve most.
    """
    own = mean_over_horizon(view.own)
    mean = sum(map(mean_over_horizon, (view.own, *view.peers))) / (1 + len(view.peers))
    if not view.peers or own <= mean * (1 + parameters.excess):
        return Trigger(reason=f"{own:.0f} tokens forecast, mean of the set {mean:.0f}"), State()
    since_ns = state.since_ns if state.since_ns is not None else now_ns
    reason = f"{own:.0f} tokens forecast, {own / mean - 1:.0%} above the mean for {(now_ns - since_ns) // _MS} ms"
    if now_ns - since_ns < parameters.persistence_ms * _MS:
        return Trigger(reason=reason), State(since_ns)
    movable = fitting(view.sequences, max(own, view.own.demand) - mean)
    chosen = sorted(movable, key=lambda each: (-each.tokens * _rest(each.rest_p50), each.sequence))
    return Trigger(offers=tuple(each.sequence for each in chosen[: parameters.offers_max]), reason=reason), State(
        since_ns
    )


def _rest(rest_p50: int | None) -> int:
    """Weight of a predicted rest; an unknown one counts as one token, so that length alone decides."""
    return max(1, rest_p50) if rest_p50 is not None else 1


def burden(view: BurdenView, parameters: Parameters) -> int:
    """Delay of the bidder's own sequences; without a forecast the tokens stand for it, a nanosecond each."""
    return view.forecast.others_delay_ns if view.forecast is not None else view.own.demand


def pick(view: PickView, parameters: Parameters) -> PickDecision:
    """The bid with the smallest sum of delays, equal ones by name.

    For balance it must save more than the margin, and the larger of the two loads must fall. For every other reason
    the sequence has to leave: the best bid wins whatever it costs. Nobody where nobody bids.
    """
    if not view.bids:
        return PickDecision(None, "nobody bids", [])
    order = sorted(view.bids, key=lambda bid: (_caused_ns(bid, view), bid.bidder))
    scores = [CandidateScore(bid.bidder, _caused_ns(bid, view) / 1e9, _note(bid, view)) for bid in order]
    if view.reason is not MoveReason.BALANCE:
        chosen = order[0]
        own = f", itself {_seconds(chosen.rest_ns)} more to run there" if view.stay_ns else ""
        reason = f"least delay of {len(order)}: others {_seconds(chosen.burden_ns)}{own}"
        return PickDecision(chosen.bidder, reason, scores)
    falling = [bid for bid in order if not _note(bid, view)]
    if not falling:
        return PickDecision(None, "no bid would make the larger load fall", scores)
    return _balanced(view, falling[0], parameters, scores)


def _balanced(view: PickView, bid: BidView, parameters: Parameters, scores: list[CandidateScore]) -> PickDecision:
    saved_ns = view.gain_ns + view.stay_ns - _caused_ns(bid, view) - view.cost_ns
    margin_ns = max(parameters.margin_ms * _MS, int(parameters.margin_share * view.stay_ns))
    if saved_ns <= margin_ns:
        return PickDecision(None, f"would save {_seconds(saved_ns)}, margin {_seconds(margin_ns)}", scores)
    return PickDecision(bid.bidder, f"saves {_seconds(saved_ns)} in all, {_seconds(view.cost_ns)} of cost off", scores)


def _caused_ns(bid: BidView, view: PickView) -> int:
    """Delay of the bidder's sequences, and the time that this one still runs there, where both sides know it."""
    return bid.burden_ns + (bid.rest_ns if view.stay_ns else 0)


def _note(bid: BidView, view: PickView) -> str:
    falls = maximum_falls(view.own.demand, bid.load_tokens, view.sequence.tokens)
    return "" if view.reason is not MoveReason.BALANCE or falls else "would be the heavier one"


def _seconds(time_ns: int) -> str:
    return f"{time_ns / 1e9:.2f} s"
