"""Most idle: where most KV memory is free afterwards; the nearer one of two alike."""

from __future__ import annotations

from random import Random

import msgspec

from millrace.policies.migration.ranking import idle_share, pick
from millrace.policies.migration.view import TargetDecision, TargetQuestion, TargetView


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resolution of the comparison: of two candidates in the same band, the nearer one wins.

    Attributes:
        bands: Idle shares are compared in so many steps; 1 to 1,000. With 10, a tenth of the memory is no difference.
    """

    bands: int = 10

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        if not 1 <= self.bands <= 1_000:
            raise ValueError(f"bands must be in [1, 1000], is {self.bands}")


def decide(question: TargetQuestion, parameters: Parameters, now_ns: int, rng: Random) -> TargetDecision:
    """By band of idle memory, then by machine, then by waiting sequences, then by idle blocks."""

    def key(target: TargetView) -> tuple[float, ...]:
        share = idle_share(target, question.blocks)
        band = min(parameters.bands - 1, int(share * parameters.bands))
        return (band, target.same_machine, -target.waiting, share)

    return pick(question, key)
