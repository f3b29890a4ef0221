"""Transitions of a sequence: which event leads from which state to which other one, and what is done then.

``react`` looks an event up, takes the first row whose guard holds, sets the state and calls the row's reaction; no
other code sets it. An event that is not listed for the present state is a bug and raises ``TransitionRefused``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.actor.transitions import Transition, TransitionTable

from services.ingress.calls.completion import finish, release
from services.ingress.dispatch.submission import (
    accept,
    ask_again,
    await_forecasts,
    enqueue,
    forget_question,
    retry_refused,
    retry_unanswered,
    submit,
    unheard,
)
from services.ingress.failover.failover import fail_over, finish_from_log, log_complete
from services.ingress.failover.poison import refuse_at_fault, request_at_fault
from services.ingress.failover.resend import request_resend
from services.ingress.lifecycle import (
    Accepted,
    Cancelled,
    Deferred,
    Finished,
    ForecastsReceived,
    ForecastsRequested,
    InstanceLost,
    Migrated,
    SequenceEvent,
    SequencePhase,
    SubmissionRefused,
    SubmissionUnanswered,
    Submitted,
    TargetLost,
    TokensMissing,
)
from services.ingress.migration.epoch_grants import target_alive
from services.ingress.migration.ownership import give_up_target, stay_with_source, switch_owner, verify_target
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState

#: Both take (state, sequence, event); the event is of the type that the row names.
Guard = Callable[[IngressState, OpenSequence, Any], bool]
Reaction = Callable[[IngressState, OpenSequence, Any], None]

_S = SequencePhase

#: Life cycle of a sequence.
TRANSITIONS = TransitionTable[SequencePhase, type[SequenceEvent], Guard, Reaction](
    Transition(_S.WAITING, Deferred, _S.WAITING, enqueue),
    Transition(_S.WAITING, ForecastsRequested, _S.FORECASTING, await_forecasts),
    Transition(_S.WAITING, Submitted, _S.SUBMITTED, submit),
    Transition(_S.WAITING, Cancelled, _S.ENDED, release),
    #
    Transition(_S.FORECASTING, ForecastsReceived, _S.WAITING, forget_question),
    Transition(_S.FORECASTING, Cancelled, _S.ENDED, release),
    #
    Transition(_S.SUBMITTED, Accepted, _S.RUNNING, accept),
    Transition(_S.SUBMITTED, SubmissionRefused, _S.WAITING, retry_refused),
    Transition(_S.SUBMITTED, SubmissionUnanswered, _S.SUBMITTED, ask_again, guard=unheard),
    Transition(_S.SUBMITTED, SubmissionUnanswered, _S.WAITING, retry_unanswered),
    Transition(_S.SUBMITTED, InstanceLost, _S.ENDED, finish_from_log, guard=log_complete),
    Transition(_S.SUBMITTED, InstanceLost, _S.ENDED, refuse_at_fault, guard=request_at_fault),
    Transition(_S.SUBMITTED, InstanceLost, _S.WAITING, fail_over),
    Transition(_S.SUBMITTED, Cancelled, _S.ENDED, release),
    #
    Transition(_S.RUNNING, TokensMissing, _S.RUNNING, request_resend),
    Transition(_S.RUNNING, Finished, _S.ENDED, finish),
    Transition(_S.RUNNING, InstanceLost, _S.ENDED, finish_from_log, guard=log_complete),
    Transition(_S.RUNNING, InstanceLost, _S.ENDED, refuse_at_fault, guard=request_at_fault),
    Transition(_S.RUNNING, InstanceLost, _S.VERIFYING, verify_target, guard=target_alive),
    Transition(_S.RUNNING, InstanceLost, _S.WAITING, fail_over),
    Transition(_S.RUNNING, Migrated, _S.RUNNING, switch_owner),
    Transition(_S.RUNNING, TargetLost, _S.RUNNING, stay_with_source),
    Transition(_S.RUNNING, Cancelled, _S.ENDED, release),
    #
    Transition(_S.VERIFYING, Migrated, _S.RUNNING, switch_owner),
    Transition(_S.VERIFYING, TargetLost, _S.WAITING, give_up_target),
    Transition(_S.VERIFYING, Cancelled, _S.ENDED, release),
)


def react(state: IngressState, sequence: OpenSequence, event: SequenceEvent) -> None:
    """Take the transition of an event.

    Raises:
        TransitionRefused: the table lists none.
    """
    row = TRANSITIONS.take(sequence.phase, type(event), lambda guard: guard(state, sequence, event), who=sequence.id)
    sequence.phase = row.target
    row.reaction(state, sequence, event)
