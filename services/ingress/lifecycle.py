"""Lifecycle of a sequence: one table of states, events, guards and reactions.

A *sequence* is one choice of one prompt. It is owned by ingress or by one instance, and the table says which events
move it between them. ``OpenSequence.advance`` looks an event up, takes the first transition whose guard holds, and sets
the state; no other code assigns it. The caller (``reactions.py``) then carries out the reaction. An event that the
table does not list for the present state is a bug and raises ``TransitionRefused``.

    WAITING      ingress owns the sequence: its length tag is awaited, or it is to be dispatched
    FORECASTING  the same, and predictors are asked about it
    SUBMITTED    sent to an instance in the current epoch; the answer is awaited
    RUNNING      owned by its instance in the current epoch
    VERIFYING    its instance is lost; the target of its migration is asked whether it holds the sequence
    ENDED        terminal

Events that a sequence of another epoch or instance causes never reach the table: token ingest and the reply router
drop them first.
"""

from __future__ import annotations

from enum import Enum

import msgspec
from millrace.actor.transitions import Transition, TransitionTable
from millrace.contracts.local import RequestFailure
from millrace.contracts.worker import SequenceRefused

from services.ingress.dispatch.choice_record import DispatchChoice


class SequencePhase(Enum):
    """State of a sequence."""

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python; the table is looked up with each event

    WAITING = "waiting"
    FORECASTING = "forecasting"
    SUBMITTED = "submitted"
    RUNNING = "running"
    VERIFYING = "verifying"
    ENDED = "ended"


class Deferred(msgspec.Struct, frozen=True):
    """No instance takes it now: it is dispatched again after a pause, nanoseconds."""

    pause_ns: int


class ForecastsRequested(msgspec.Struct, frozen=True):
    """Predictors were asked under this correlation."""

    correlation: str


class ForecastsReceived(msgspec.Struct, frozen=True):
    """Predictors answered, or their deadline passed."""


class Submitted(msgspec.Struct, frozen=True):
    """An instance was chosen."""

    choice: DispatchChoice


class Accepted(msgspec.Struct, frozen=True):
    """The instance owns it: the worker answered so, or tokens of the epoch arrived first. ``kv_tokens``: as in
    SequenceAccepted.
    """

    kv_tokens: int = 0


class SubmissionRefused(msgspec.Struct, frozen=True):
    """The worker did not take it."""

    answer: SequenceRefused


class SubmissionUnanswered(msgspec.Struct, frozen=True):
    """The worker did not answer, or not with what was asked."""

    reason: RequestFailure


class LossCause(Enum):
    """Whether the sequence may itself have caused the loss of its instance."""

    ENGINE_ERROR = "engine error"  # the engine ended this sequence with an error
    ENGINE_DIED = "engine died"  # the engine or its worker died while it had this sequence, among others
    ENGINE_SILENT = "engine silent"  # neither gives a sign of life since it has this sequence, among others
    OTHER = "other"


class InstanceLost(msgspec.Struct, frozen=True):
    """Its instance is gone, gave it up, forgot it or stalls. ``why`` is the label of the metric and of the log."""

    why: str
    cause: LossCause = LossCause.OTHER


class TokensMissing(msgspec.Struct, frozen=True):
    """The log has a gap, or its instance has been silent: it is asked for what comes after the log."""


class Finished(msgspec.Struct, frozen=True):
    """The log ends with a finish reason. ``engine_knows`` is False where ingress found the end (a stop string)."""

    engine_knows: bool


class Migrated(msgspec.Struct, frozen=True):
    """The target of its migration is proven to continue this very log."""


class TargetLost(msgspec.Struct, frozen=True):
    """The target of its migration is gone, or does not hold it."""


class Cancelled(msgspec.Struct, frozen=True):
    """Its call ended: the client left, a time limit passed, or the call cannot be served."""

    reason: str


SequenceEvent = (
    Deferred
    | ForecastsRequested
    | ForecastsReceived
    | Submitted
    | Accepted
    | SubmissionRefused
    | SubmissionUnanswered
    | InstanceLost
    | TokensMissing
    | Finished
    | Migrated
    | TargetLost
    | Cancelled
)


class Guard(Enum):
    """Condition of a transition, evaluated by ``reactions.holds``."""

    LOG_COMPLETE = "the log already ends as its engine would have ended it"
    AT_FAULT = "the same failure repeats without a new token: the request causes it"
    UNHEARD = "its instance gave no sign of life since it was asked"
    TARGET_ALIVE = "a migration is under way and its target is alive"


class Reaction(Enum):
    """Effect of a transition; ``reactions.REACTIONS`` maps each to its function."""

    __hash__ = object.__hash__  # as above

    ENQUEUE = "enqueue"
    AWAIT_FORECASTS = "await forecasts"
    FORGET_QUESTION = "forget question"
    SUBMIT = "submit"
    ACCEPT = "accept"
    ASK_AGAIN = "ask again"
    RETRY_REFUSED = "retry refused"
    RETRY_UNANSWERED = "retry unanswered"
    REQUEST_RESEND = "request resend"
    FINISH = "finish"
    FINISH_FROM_LOG = "finish from log"
    FAIL_OVER = "fail over"
    REFUSE_AT_FAULT = "refuse at fault"
    VERIFY_TARGET = "verify target"
    SWITCH_OWNER = "switch owner"
    STAY_WITH_SOURCE = "stay with source"
    GIVE_UP_TARGET = "give up target"
    RELEASE = "release"


_S, _G, _R = SequencePhase, Guard, Reaction

#: Life cycle of a sequence.
TRANSITIONS = TransitionTable[SequencePhase, type[SequenceEvent], Guard, Reaction](
    Transition(_S.WAITING, Deferred, _S.WAITING, _R.ENQUEUE),
    Transition(_S.WAITING, ForecastsRequested, _S.FORECASTING, _R.AWAIT_FORECASTS),
    Transition(_S.WAITING, Submitted, _S.SUBMITTED, _R.SUBMIT),
    Transition(_S.WAITING, Cancelled, _S.ENDED, _R.RELEASE),
    #
    Transition(_S.FORECASTING, ForecastsReceived, _S.WAITING, _R.FORGET_QUESTION),
    Transition(_S.FORECASTING, Cancelled, _S.ENDED, _R.RELEASE),
    #
    Transition(_S.SUBMITTED, Accepted, _S.RUNNING, _R.ACCEPT),
    Transition(_S.SUBMITTED, SubmissionRefused, _S.WAITING, _R.RETRY_REFUSED),
    Transition(_S.SUBMITTED, SubmissionUnanswered, _S.SUBMITTED, _R.ASK_AGAIN, guard=_G.UNHEARD),
    Transition(_S.SUBMITTED, SubmissionUnanswered, _S.WAITING, _R.RETRY_UNANSWERED),
    Transition(_S.SUBMITTED, InstanceLost, _S.ENDED, _R.FINISH_FROM_LOG, guard=_G.LOG_COMPLETE),
    Transition(_S.SUBMITTED, InstanceLost, _S.ENDED, _R.REFUSE_AT_FAULT, guard=_G.AT_FAULT),
    Transition(_S.SUBMITTED, InstanceLost, _S.WAITING, _R.FAIL_OVER),
    Transition(_S.SUBMITTED, Cancelled, _S.ENDED, _R.RELEASE),
    #
    Transition(_S.RUNNING, TokensMissing, _S.RUNNING, _R.REQUEST_RESEND),
    Transition(_S.RUNNING, Finished, _S.ENDED, _R.FINISH),
    Transition(_S.RUNNING, InstanceLost, _S.ENDED, _R.FINISH_FROM_LOG, guard=_G.LOG_COMPLETE),
    Transition(_S.RUNNING, InstanceLost, _S.ENDED, _R.REFUSE_AT_FAULT, guard=_G.AT_FAULT),
    Transition(_S.RUNNING, InstanceLost, _S.VERIFYING, _R.VERIFY_TARGET, guard=_G.TARGET_ALIVE),
    Transition(_S.RUNNING, InstanceLost, _S.WAITING, _R.FAIL_OVER),
    Transition(_S.RUNNING, Migrated, _S.RUNNING, _R.SWITCH_OWNER),
    Transition(_S.RUNNING, TargetLost, _S.RUNNING, _R.STAY_WITH_SOURCE),
    Transition(_S.RUNNING, Cancelled, _S.ENDED, _R.RELEASE),
    #
    Transition(_S.VERIFYING, Migrated, _S.RUNNING, _R.SWITCH_OWNER),
    Transition(_S.VERIFYING, TargetLost, _S.WAITING, _R.GIVE_UP_TARGET),
    Transition(_S.VERIFYING, Cancelled, _S.ENDED, _R.RELEASE),
)
