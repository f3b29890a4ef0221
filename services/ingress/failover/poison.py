"""Poison requests: a request that makes engines fail is refused, not tried on all of them.

    failure without a new token                      consequence
    an engine ends it with an error                  one more instance is tried, unless it has an output constraint:
                                                       then that is the reason
    a second engine does                             refused
    its engine dies or hangs while it has it         failover, as for every sequence of that engine, unless it is a
                                                       suspect (``instance_loss.py``)
    a second one does, or it is a suspect            the next try is a *trial*: one sequence of this ingress at a time,
                                                       on an idle instance (``dispatch/trial.py``)
    the engine of its trial is lost                  refused if it was alone there, else tried again

A new token ends the count: an innocent sequence that lived through two deaths passes its trial with its first token.
Deaths beside others prove nothing, so kills at random blame nobody; ``fruitless_max`` bounds those tries.
The client gets a 400, since a retry would do the same again.
"""

from __future__ import annotations

from services.ingress import tracing
from services.ingress.calls.completion import end_sequence, refuse_or_fail
from services.ingress.calls.messages import RefusalKind
from services.ingress.lifecycle import InstanceLost, LossCause
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState

#: Errors of engines in a row without a new token after which the request is refused.
ERRORS_MAX = 2


def request_at_fault(state: IngressState, sequence: OpenSequence, event: InstanceLost) -> bool:
    """Whether this loss shows that the request causes it: the same failure repeats without a new token."""
    if event.cause is LossCause.ENGINE_ERROR:
        return bool(sequence.call.call.constraint_param) or sequence.retry.errors + 1 >= ERRORS_MAX
    return event.cause in (LossCause.ENGINE_DIED, LossCause.ENGINE_SILENT) and sequence.retry.alone


def refuse_at_fault(state: IngressState, sequence: OpenSequence, event: InstanceLost) -> None:
    """Reaction: end the call with an error that says that the request is at fault."""
    call = sequence.call
    if event.cause is LossCause.ENGINE_ERROR:
        param = call.call.constraint_param
        detail = f"{ERRORS_MAX} engines ended this request with an error; it was not tried again."
        if param:
            detail = f"The engine ended this request with an error: most likely its constraint (`{param}`) is too slow."
    else:
        deaths = sequence.retry.deaths + 1
        detail = f"{deaths} engines in a row died or fell silent while they had this request, the last one alone."
        param = ""
    tracing.end_placement(state, sequence, event.why)
    end_sequence(state, sequence, decoding=True, reason="at_fault")
    refuse_or_fail(state, call, RefusalKind.AT_FAULT, detail, param=param)
