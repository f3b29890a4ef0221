"""ARES's rescheduling by future load, traded between brokers instead of decided in one place.

The source weighs its forecast tokens over a horizon against its peers', and offers the sequence whose move would lower
the weighted variance most; each bidder says what it will carry while the sequence is there; the source moves where the
variance falls. ``rescheduling.py`` decides in one place, with every instance's curve.

Source: ARES, section 5.2 and algorithm 1; README.md says where it differs.
"""

from __future__ import annotations

import msgspec
import numpy as np
from millrace.contracts.broker import MoveReason
from millrace.contracts.observers import CandidateScore
from millrace.policies.trading.view import (
    BidView,
    BurdenView,
    LoadView,
    MovableSequence,
    PickDecision,
    PickView,
    Trigger,
    TriggerView,
)
from numpy.typing import NDArray

Curve = NDArray[np.float64]

#: Points of the horizon where nobody has a curve: the present alone.
_PRESENT = 1

name = "ares"
needs_forecast = True


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters that the paper names without giving their values.

    Attributes:
        theta: An instance is overloaded where its weighted load exceeds the mean of its set by this share; at least 0.
        decay: Weight of a point of the horizon over that of the one before it; above 0, at most 1.
        memory: Share of a target's blocks that may be in use at any point of the horizon; above 0, at most 1.
        margin: Share of the set's weighted variance that a move must remove; from 0 to 1.
        offers_max: Sequences offered at a time; at least 1.
    """

    theta: float = 0.1
    decay: float = 0.9
    memory: float = 0.95
    margin: float = 0.02
    offers_max: int = 1

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        if not 0 <= self.theta < float("inf"):
            raise ValueError(f"theta must be at least 0 and finite, is {self.theta}")
        for field in ("decay", "memory"):
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(f"{field} must be above 0 and at most 1, is {getattr(self, field)}")
        if not 0 <= self.margin <= 1:
            raise ValueError(f"margin must be from 0 to 1, is {self.margin}")
        if self.offers_max < 1:
            raise ValueError(f"offers_max must be at least 1, is {self.offers_max}")


class State(msgspec.Struct, frozen=True):
    """It has none: each decision is made of the present curves alone."""


def trigger(view: TriggerView, parameters: Parameters, state: State, now_ns: int) -> tuple[Trigger, State]:
    """Offers what lowers the variance most at any peer below the mean that has room for it.

    Nothing without peers, and no sequence whose rest nobody predicts.
    """
    curves = _curves((view.own, *view.peers))
    weights = _weights(curves.shape[1], parameters.decay)
    loads = curves @ weights
    mean = float(loads.mean())
    if not view.peers or loads[0] <= (1 + parameters.theta) * mean:
        return Trigger(reason=f"{loads[0]:.0f} tokens weighted, mean of the set {mean:.0f}"), state
    known = [each for each in view.sequences if each.rest_p50 is not None]
    light = [index for index in range(1, len(curves)) if loads[index] < mean]
    if not known or not light:
        return Trigger(reason="nobody could move, or nobody is below the mean"), state
    moved = np.stack([tokens_over_horizon(each, view.own, curves.shape[1]) for each in known])
    gains = _gains(moved, curves[0], curves[light], weights, count=len(curves))
    gains[~_fits(moved, known, [view.peers[index - 1] for index in light], parameters.memory)] = -np.inf
    best = gains.max(axis=1)
    least = parameters.margin * _variance(curves, weights)
    order = sorted(range(len(known)), key=lambda row: (-best[row], known[row].sequence))
    chosen = [row for row in order if best[row] > least][: parameters.offers_max]
    reason = f"{loads[0] / mean - 1:.0%} above the mean, variance could fall by {max(0.0, best.max()):.3g} tokens²"
    return Trigger(offers=tuple(known[row].sequence for row in chosen), reason=reason), state


def burden(view: BurdenView, parameters: Parameters) -> int:
    """Tokens that the bidder will carry while the sequence is there, weighted as the variance weighs them."""
    points = len(_curve(view.own))
    moved = tokens_over_horizon(view.sequence, view.asker or view.own, points)
    shares = _weights(points, parameters.decay) * moved
    total = float(shares.sum())
    return round(float(shares @ _curve(view.own)) / total) if total > 0 else view.own.demand


def pick(view: PickView, parameters: Parameters) -> PickDecision:
    """The bid with the lightest burden; equal ones by start and name.

    For balance the variance must fall, the bidder must preempt nobody, and the sequence must run longer than the move
    takes. For every other reason the sequence has to leave: the best bid wins. Nobody where nobody bids.
    """
    if not view.bids:
        return PickDecision(None, "nobody bids", [])
    order = sorted(view.bids, key=lambda bid: (bid.burden_ns, bid.bidder))
    scores = [CandidateScore(bid.bidder, float(bid.burden_ns), _note(bid)) for bid in order]
    if view.reason is not MoveReason.BALANCE:
        return PickDecision(order[0].bidder, f"lightest of {len(order)}: {order[0].burden_ns} tokens", scores)
    if _stay_ns(view) <= view.cost_ns:
        return PickDecision(None, "it ends before a move pays", scores)
    able = [bid for bid in order if not _note(bid)]
    if not able:
        return PickDecision(None, "no bidder has room over the horizon", scores)
    relief = _relief(view, parameters)
    if relief <= able[0].burden_ns:
        return PickDecision(None, f"variance would rise: {able[0].burden_ns} tokens there, {relief:.0f} here", scores)
    return PickDecision(able[0].bidder, f"variance falls: {able[0].burden_ns} tokens there, {relief:.0f} here", scores)


def tokens_over_horizon(sequence: MovableSequence, at: LoadView, points: int) -> Curve:
    """KV tokens of a sequence at each point of an instance's horizon: they grow until it ends, and are 0 after."""
    step_ns = at.curve.step_ns if at.curve is not None else 0
    rate = at.tokens_per_s / at.running if at.running else 0.0
    grown = np.arange(points) * (rate * step_ns / 1e9)
    rest = sequence.rest_p50 if sequence.rest_p50 is not None else float("inf")
    return np.where(grown < rest, sequence.tokens + grown, 0.0)


def _curve(load: LoadView) -> Curve:
    """Tokens over the horizon with what was agreed; the present demand where there is no forecast."""
    if load.curve is None or not load.curve.tokens:
        return np.full(_PRESENT, float(load.demand))
    return np.asarray(load.curve.tokens, np.float64) + load.queued_tokens


def _curves(loads: tuple[LoadView, ...]) -> Curve:
    """All on the shortest common horizon; a single present value stands for all of it."""
    found = [_curve(load) for load in loads]
    points = min((len(curve) for curve in found if len(curve) > _PRESENT), default=_PRESENT)
    return np.stack([curve[:points] if len(curve) > _PRESENT else np.full(points, curve[0]) for curve in found])


def _weights(points: int, decay: float) -> Curve:
    """Weights of the points; their sum is 1."""
    weights = decay ** np.arange(points)
    return np.asarray(weights / weights.sum())


def _gains(moved: Curve, source: Curve, targets: Curve, weights: Curve, *, count: int) -> Curve:
    """By how much each move lowers the weighted variance, (sequences, targets).

    Taking ``x`` from ``a`` to ``b`` lowers the variance of ``count`` loads by ``2 / count * x * (a - b - x)``.
    """
    weighted = moved * weights
    own = (weighted * (source - moved)).sum(axis=1)
    return np.asarray(2.0 / count * (own[:, None] - weighted @ targets.T))


def _variance(curves: Curve, weights: Curve) -> float:
    return float(curves.var(axis=0) @ weights)


def _fits(moved: Curve, sequences: list[MovableSequence], targets: list[LoadView], share: float) -> NDArray[np.bool_]:
    """Whether each target holds each sequence at every point, with all that both of them grow: (sequences, targets)."""
    tokens_a_block = max((each.tokens / each.blocks for each in sequences if each.blocks), default=1.0)
    blocks = np.ceil(moved / tokens_a_block)
    found = np.empty((len(sequences), len(targets)), bool)
    for column, target in enumerate(targets):
        used = _used_blocks(target, moved.shape[1], tokens_a_block)
        found[:, column] = (blocks + used <= share * target.blocks_total).all(axis=1)
    return found


def _used_blocks(load: LoadView, points: int, tokens_a_block: float) -> Curve:
    queued = load.queued_tokens / tokens_a_block
    if load.curve is None or len(load.curve.blocks) < points:
        return np.full(points, load.blocks_total - load.blocks_free + queued)
    return np.asarray(load.curve.blocks[:points], np.float64) + queued


def _stay_ns(view: PickView) -> float:
    """Return the time that the sequence would still run at the source, ns.

    Forecast, or its predicted rest at the present rate.
    """
    if view.stay_ns or view.sequence.rest_p50 is None:
        return view.stay_ns
    own = view.own
    return view.sequence.rest_p50 * own.running / own.tokens_per_s * 1e9 if own.tokens_per_s else 0.0


def _relief(view: PickView, parameters: Parameters) -> float:
    """The burden below which the variance falls: what the source carries beside the sequence, weighted likewise."""
    source = _curve(view.own)
    moved = tokens_over_horizon(view.sequence, view.own, len(source))
    shares = _weights(len(source), parameters.decay) * moved
    total = float(shares.sum())
    return float(shares @ (source - moved)) / total if total > 0 else 0.0


def _note(bid: BidView) -> str:
    return "would preempt" if bid.preemptions or bid.blocks_idle < 0 else ""
