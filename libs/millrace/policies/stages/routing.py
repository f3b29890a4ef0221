"""Choice of the stage that serves a length: the one whose range covers it, else its neighbours by distance.

A stage that is full spills to the next longer one, never to a shorter one: a long sequence in a stage of short ones
slows all of them. A stage that has lost every instance is covered by the next longer, else by the nearest shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


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
