"""Open questions of an ingress to other services, by correlation in ``IngressState.pending``."""

from __future__ import annotations

import msgspec
from millrace.contracts.worker import ChangeAdapter

from services.ingress.calls.open_call import OpenCall
from services.ingress.cascade.open_cascade import Attempt, OpenCascade
from services.ingress.sequence import EpochGrant, OpenSequence


class PendingTag(msgspec.Struct, frozen=True):
    """An open TagRequest."""

    call: OpenCall
    started_ns: int
    span: str


class PendingSubmit(msgspec.Struct, frozen=True):
    """An open SubmitSequence."""

    sequence: OpenSequence
    epoch: int


class PendingForecast(msgspec.Struct, frozen=True, kw_only=True):
    """An open question to predictors.

    Attributes:
        sequences: Dispatched together once it is answered.
        asked: Instances whose future is asked for.
        placements: For each instance asked, its count of placements at that time.
        pause_ns: How long nobody is asked if this is one silence too many.
    """

    sequences: list[OpenSequence]
    asked: tuple[str, ...]
    placements: tuple[int, ...]
    started_ns: int
    span: str
    pause_ns: int


class PendingResend(msgspec.Struct, frozen=True):
    """An open ResendTokens to the owner."""

    sequence: OpenSequence
    epoch: int


class PendingProof(msgspec.Struct, frozen=True):
    """An open ResendTokens to a migration's target: does it hold the sequence, and with which tokens?"""

    sequence: OpenSequence
    grant: EpochGrant


class PendingJudge(msgspec.Struct, frozen=True):
    """An open JudgeAnswer."""

    cascade: OpenCascade
    attempt: Attempt
    started_ns: int


class PendingAdapter(msgspec.Struct, frozen=True):
    """An open ChangeAdapter to all these instances."""

    request: str
    model: str
    order: ChangeAdapter
    instances: tuple[str, ...]


Pending = PendingAdapter | PendingJudge | PendingTag | PendingForecast | PendingSubmit | PendingResend | PendingProof
