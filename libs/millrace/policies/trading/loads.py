"""Comparisons of loads that several trading policies make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millrace.contracts.broker import LoadReported
from millrace.policies.trading.view import LoadView, MovableSequence


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


def load_view(body: LoadReported) -> LoadView:
    """A load as policies see it."""
    return LoadView(
        name=body.instance,
        tokens=body.tokens,
        waiting_tokens=body.waiting_tokens,
        queued_tokens=body.queued_tokens,
        running=body.running,
        waiting=body.waiting,
        blocks_free=body.blocks_free,
        blocks_total=body.blocks_total,
        tokens_per_s=body.tokens_per_s,
        curve=body.curve,
    )


def lightest(loads: Iterable[LoadView], *, blocks: int, count: int) -> list[LoadView]:
    """At most ``count`` loads of those that carry least for their memory, equal ones by name.

    Those with so many blocks free come first: another one may have room by the time that it is asked.
    """

    def key(load: LoadView) -> tuple[bool, float, str]:
        return (load.blocks_free < blocks, load.demand / max(1, load.blocks_total), load.name)

    return sorted(loads, key=key)[:count]
