"""Listener of a call: who is told of its course. The HTTP adapter, or the cascade that the call is an attempt of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from millrace.actor.effects import Effect

from services.ingress.calls.limits import Refusal
from services.ingress.calls.messages import AcceptCall, ChoiceDelta, CompleteCall, DeliverDeltas, FailCall, RefuseCall

if TYPE_CHECKING:
    from services.ingress.calls.open_call import OpenCall


class Listener:
    """Receiver of what becomes of one call: the HTTP adapter, told by effects.

    Attributes:
        is_client: The call is a client's own: it counts in admission, and in the latencies that clients see.
    """

    is_client = True

    def __init__(self, emit: Callable[[Effect], None]) -> None:
        self._emit = emit

    def on_accepted(self, call: OpenCall) -> None:
        """Every sequence was accepted by an instance."""
        self._emit(AcceptCall(request=call.request))

    def on_tokens(self, call: OpenCall) -> None:
        """Tokens of a judged call arrived; they need not give a delta. Clients see deltas alone."""

    def on_deltas(self, call: OpenCall, deltas: list[ChoiceDelta]) -> None:
        """New text, between acceptance and end."""
        self._emit(DeliverDeltas(request=call.request, deltas=deltas, usage=call.usage()))

    def on_completed(self, call: OpenCall) -> None:
        """Every choice ended."""
        self._emit(CompleteCall(request=call.request, usage=call.usage()))

    def on_failed(self, call: OpenCall, refusal: Refusal) -> None:
        """The call cannot be served; ``call.accepted`` says whether it was refused or failed."""
        self._emit(failure(call.request, refusal, accepted=call.accepted))


def failure(request: str, refusal: Refusal, *, accepted: bool) -> Effect:
    """The effect that ends a call which cannot be served."""
    kind, detail, param = refusal.kind, refusal.detail, refusal.param
    if accepted:
        return FailCall(request=request, kind=kind, detail=detail, param=param)
    return RefuseCall(request=request, kind=kind, detail=detail, param=param, retry_after_s=refusal.retry_after_s)
