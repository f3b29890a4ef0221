"""What an ingress has asked of others and not been answered yet, by correlation in ``IngressState.pending``."""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.cluster.instances import KnownInstance


class PendingTag(msgspec.Struct, frozen=True):
    """A TagRequest under way."""

    call: Any
    started_ns: int
    span: str


class PendingSubmit(msgspec.Struct, frozen=True):
    """A SubmitSequence under way."""

    sequence: Any
    epoch: int
    instance: KnownInstance


class PendingForecast(msgspec.Struct, frozen=True, kw_only=True):
    """A question to predictors under way.

    Attributes:
        sequences: Placed together once it is answered.
        asked: Instances whose future is asked for.
        drawn: Those of them among whom the policy chooses; all but for a rank sample.
        sampled: All candidates are asked, to learn the rank of the chosen one.
        placements: Of each instance asked, its count of placements when it was asked.
        pause_ns: How long nobody is asked if this is one silence too many.
    """

    sequences: list[Any]
    asked: tuple[str, ...]
    drawn: tuple[str, ...]
    sampled: bool
    placements: tuple[int, ...]
    started_ns: int
    span: str
    pause_ns: int


class PendingResend(msgspec.Struct, frozen=True):
    """A ResendTokens under way."""

    sequence: Any
    epoch: int


class PendingProof(msgspec.Struct, frozen=True):
    """A ResendTokens to a migration's target under way: has it the sequence, and with which tokens?"""

    sequence: Any
    allotment: Any


Pending = PendingTag | PendingForecast | PendingSubmit | PendingResend | PendingProof


class PredictorsHealth:
    """How the predictors of one model have answered.

    Attributes:
        silences: Questions in a row without any answer.
        from_ns: Nobody is asked before.
        told: The log says that predictions are missing, and not yet that they are back.
        absurd_told: The log has shown a prediction that is not to be believed.
    """

    __slots__ = ("absurd_told", "from_ns", "silences", "told")

    def __init__(self) -> None:
        self.silences = 0
        self.from_ns = 0
        self.told = False
        self.absurd_told = False
