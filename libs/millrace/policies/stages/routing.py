"""Choice of the stage that serves a length: the one whose range covers it, else its neighbours by distance.

A stage that is full spills to the next longer one, never to a shorter one: a long sequence in a stage of short ones
slows all of them. A stage that has lost every instance is covered by the next longer, else by the nearest shorter one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol, TypeVar

from millrace.contracts.plan import Stage


class LengthRange(Protocol):
    """A range of sequence lengths, tokens; ``length_max`` is exclusive, None for no bound."""

    @property
    def length_min(self) -> int:
        """First length served."""
        ...

    @property
    def length_max(self) -> int | None:
        """First length no longer served."""
        ...


R = TypeVar("R", bound=LengthRange)


def covers(stage: LengthRange, length_tokens: int) -> bool:
    """Whether sequences of that length belong here."""
    return stage.length_min <= length_tokens and (stage.length_max is None or length_tokens < stage.length_max)


def stage_order(stages: Sequence[R], length_tokens: int) -> list[R]:
    """All stages by distance: the covering one, the longer ones upwards, then the shorter ones downwards.

    Args:
        stages: Ranges that tile [0, inf), in rising order.
    """
    longer = [stage for stage in stages if stage.length_max is None or length_tokens < stage.length_max]
    return longer + [stage for stage in reversed(stages) if stage not in longer]


def stage_for(
    stages: Sequence[Stage],
    length_tokens: int,
    available: Container[str],
    *,
    full: Callable[[str], bool] = lambda name: False,
) -> Stage | None:
    """Chooses the stage that takes a sequence of this length.

    Args:
        available: Names of the instances that live.
        full: Whether an instance that lives has no room. While every longer stage is full too, the sequence queues at
            the stage that it belongs to.

    Returns:
        None where no instance of any stage lives.
    """
    alive = [s for s in stage_order(stages, length_tokens) if any(name in available for name in s.instances)]
    for stage in alive:
        longer = stage.length_max is None or length_tokens < stage.length_max
        if longer and any(name in available and not full(name) for name in stage.instances):
            return stage
    return alive[0] if alive else None
