"""Lifecycle of a cascade's call: one table of states, events, guards and reactions.

The call of a client is the *parent*; an *attempt* is a call of one member model, placed and continued like any other.

    ATTEMPTING  one attempt is open; nothing was sent to the client
    JUDGING     an attempt is complete, and its judge is asked
    STREAMING   it is settled who answers; the attempt's tokens go to the client as they come
    ENDED       terminal

``OpenCascade.advance`` looks an event up, takes the first row whose guard holds, and sets the state; no other code
assigns it. Events of an attempt that is not the current one are dropped before.
"""

from __future__ import annotations

from enum import Enum, StrEnum

import msgspec
from millrace.actor.transitions import Transition, TransitionTable

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


class CascadeGuard(Enum):
    """Condition of a row, evaluated by ``cascade/reactions.py``."""

    LAST_TIER = "no tier of the plan may follow"
    GOOD_ENOUGH = "the score reaches the threshold in force"
    NEXT_TIER = "a further tier can answer in time"
    HAS_ANSWER = "an attempt is complete"
    RESUMABLE = "a tier that was rejected early can answer after all"


class CascadeReaction(Enum):
    """Effect of a row."""

    DELIVER = "deliver"
    DELIVER_BEST = "deliver best"
    JUDGE = "judge"
    ESCALATE = "escalate"
    START_AGAIN = "start again"
    REJECT_EARLY = "reject early"
    COMMIT = "commit"
    COMPLETE = "complete"
    FAIL = "fail"
    ABANDON = "abandon"


_S, _G, _R = CascadePhase, CascadeGuard, CascadeReaction

#: Life cycle of a cascade's call.
CASCADE_TRANSITIONS = TransitionTable[CascadePhase, type[CascadeEvent], CascadeGuard, CascadeReaction](
    Transition(_S.ATTEMPTING, AnswerCompleted, _S.ENDED, _R.DELIVER, guard=_G.LAST_TIER),
    Transition(_S.ATTEMPTING, AnswerCompleted, _S.JUDGING, _R.JUDGE),
    Transition(_S.ATTEMPTING, AttemptFailed, _S.ATTEMPTING, _R.ESCALATE, guard=_G.NEXT_TIER),
    Transition(_S.ATTEMPTING, AttemptFailed, _S.ENDED, _R.DELIVER_BEST, guard=_G.HAS_ANSWER),
    Transition(_S.ATTEMPTING, AttemptFailed, _S.ATTEMPTING, _R.START_AGAIN, guard=_G.RESUMABLE),
    Transition(_S.ATTEMPTING, AttemptFailed, _S.ENDED, _R.FAIL),
    Transition(_S.ATTEMPTING, ScoreOutOfReach, _S.ATTEMPTING, _R.REJECT_EARLY),
    Transition(_S.ATTEMPTING, TextReady, _S.STREAMING, _R.COMMIT),
    Transition(_S.ATTEMPTING, ClientGone, _S.ENDED, _R.ABANDON),
    #
    Transition(_S.JUDGING, AnswerScored, _S.ENDED, _R.DELIVER, guard=_G.GOOD_ENOUGH),
    Transition(_S.JUDGING, AnswerScored, _S.ENDED, _R.DELIVER, guard=_G.LAST_TIER),
    Transition(_S.JUDGING, AnswerScored, _S.ATTEMPTING, _R.ESCALATE, guard=_G.NEXT_TIER),
    Transition(_S.JUDGING, AnswerScored, _S.ENDED, _R.DELIVER_BEST),
    Transition(_S.JUDGING, JudgementGivenUp, _S.ENDED, _R.DELIVER_BEST),
    Transition(_S.JUDGING, ClientGone, _S.ENDED, _R.ABANDON),
    #
    Transition(_S.STREAMING, AnswerCompleted, _S.ENDED, _R.COMPLETE),
    Transition(_S.STREAMING, AttemptFailed, _S.ENDED, _R.FAIL),
    Transition(_S.STREAMING, ClientGone, _S.ENDED, _R.ABANDON),
)
