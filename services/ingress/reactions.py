"""Reactions to the events of a sequence: binds the rows of ``lifecycle.TRANSITIONS`` to the code that runs on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
from services.ingress.failover.failover import fail_over, finish_from_log, finish_reason_of
from services.ingress.failover.poison import refuse_at_fault, request_at_fault
from services.ingress.failover.resend import request_resend
from services.ingress.lifecycle import Guard, Reaction, SequenceEvent
from services.ingress.migration.epoch_grants import target_alive
from services.ingress.migration.ownership import give_up_target, stay_with_source, switch_owner, verify_target
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState

#: Each has the signature (state, sequence, event); the event is of the type that the table's rows name.
REACTIONS: Mapping[Reaction, Callable[[IngressState, OpenSequence, Any], None]] = {
    Reaction.ENQUEUE: enqueue,
    Reaction.AWAIT_FORECASTS: await_forecasts,
    Reaction.FORGET_QUESTION: forget_question,
    Reaction.SUBMIT: submit,
    Reaction.ACCEPT: accept,
    Reaction.ASK_AGAIN: ask_again,
    Reaction.RETRY_REFUSED: retry_refused,
    Reaction.RETRY_UNANSWERED: retry_unanswered,
    Reaction.REQUEST_RESEND: request_resend,
    Reaction.FINISH: finish,
    Reaction.FINISH_FROM_LOG: finish_from_log,
    Reaction.FAIL_OVER: fail_over,
    Reaction.REFUSE_AT_FAULT: refuse_at_fault,
    Reaction.VERIFY_TARGET: verify_target,
    Reaction.SWITCH_OWNER: switch_owner,
    Reaction.STAY_WITH_SOURCE: stay_with_source,
    Reaction.GIVE_UP_TARGET: give_up_target,
    Reaction.RELEASE: release,
}


def holds(state: IngressState, sequence: OpenSequence, event: SequenceEvent, guard: Guard) -> bool:
    """Whether a guard's condition is true now."""
    match guard:
        case Guard.LOG_COMPLETE:
            return bool(finish_reason_of(state, sequence))
        case Guard.AT_FAULT:
            return request_at_fault(sequence, event)
        case Guard.UNHEARD:
            return unheard(state, sequence, event)
        case Guard.TARGET_ALIVE:
            return target_alive(state, sequence)


def react(state: IngressState, sequence: OpenSequence, event: SequenceEvent) -> None:
    """Advance a sequence by an event and carry out the transition's reaction.

    Raises:
        TransitionRefused: the table lists no transition.
    """
    reaction = sequence.advance(event, lambda guard: holds(state, sequence, event, guard))
    REACTIONS[reaction](state, sequence, event)
