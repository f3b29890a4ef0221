"""Lifecycle of a cascade's call: its states and its events. The table of transitions is in ``reactions.py``.

The call of a client is the *parent*; an *attempt* is a call of one member model, placed and continued like any other.

    ATTEMPTING  one attempt is open; nothing was sent to the client
    JUDGING     an attempt is complete, and its judge is asked
    STREAMING   it is settled who answers; the attempt's tokens go to the client as they come
    ENDED       terminal

Events of an attempt that is not the current one are dropped before they reach the table.
"""

from __future__ import annotations

from enum import Enum, StrEnum

import msgspec

from services.ingress.calls.limits import Refusal


class CascadePhase(Enum):
    """State of a cascade's call."""

    ATTEMPTING = "attempting"
    JUDGING = "judging"
    STREAMING = "streaming"
    ENDED = "ended"


class DeliveryReason(StrEnum):
    """Reason for which an answer was delivered."""

    SCORE = "score"  # its score reaches the threshold
    LAST_TIER = "last_tier"  # no tier comes after it
    ESCALATION_BUDGET = "escalation_budget"  # its score reaches the threshold as lowered by the budget
    DEADLINE = "deadline"  # a further attempt would end too late
    TIER_UNAVAILABLE = "tier_unavailable"  # no further tier has an instance, or those that had failed
    EARLY_COMMIT = "early_commit"  # its first tokens were good enough
    NOT_JUDGED = "not_judged"  # there is no score, and the configuration accepts such answers
    INTERRUPTED = "interrupted"  # time limit or shutdown: the best answer so far


class AnswerCompleted(msgspec.Struct, frozen=True):
    """The attempt is complete."""


class AttemptFailed(msgspec.Struct, frozen=True):
    """The attempt was refused, or failed."""

    refusal: Refusal


class ScoreOutOfReach(msgspec.Struct, frozen=True):
    """Whatever follows, the attempt cannot reach its threshold."""


class TextReady(msgspec.Struct, frozen=True):
    """There is text, and it is settled that this attempt answers, for this reason."""

    reason: DeliveryReason


class AnswerScored(msgspec.Struct, frozen=True):
    """The judge has answered, or confidence stands in for it. The attempt holds the score."""


class JudgementGivenUp(msgspec.Struct, frozen=True):
    """This ingress stops while a judge is asked. An open attempt fails by itself then."""


class ClientGone(msgspec.Struct, frozen=True):
    """Nobody reads the answer any more."""

    reason: str


CascadeEvent = (
    AnswerCompleted | AttemptFailed | ScoreOutOfReach | TextReady | AnswerScored | JudgementGivenUp | ClientGone
)
