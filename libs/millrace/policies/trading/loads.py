"""Comparisons of loads that several trading policies make."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.policies.trading.view import LoadView, MovableSequence


def mean_demand(loads: Sequence[LoadView]) -> float:
    """Mean of the demands; 0 for none."""
    return sum(load.demand for load in loads) / len(loads) if loads else 0.0


def mean_over_horizon(load: LoadView) -> float:
    """Tokens that it is forecast to carry, averaged over the curve; its present demand where there is none."""
    curve = load.curve
    if curve is None or not curve.tokens:
        return float(load.demand)
    return sum(curve.tokens) / len(curve.tokens) + load.queued_tokens


def maximum_falls(source_tokens: int, target_tokens: int, moved_tokens: int) -> bool:
    """Whether the larger of the two loads is smaller after the move: moves that all obey this come to an end."""
    return target_tokens + moved_tokens < source_tokens


def fitting(sequences: Sequence[MovableSequence], excess_tokens: float) -> list[MovableSequence]:
    """Sequences no longer than the excess: whoever moves more makes the target the heavier one."""
    return [each for each in sequences if each.tokens <= excess_tokens]
