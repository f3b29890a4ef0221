"""Delivery of deltas to whom a call belongs."""

from __future__ import annotations

from millrace.actor.effects import Effect

from services.ingress.calls.messages import ChoiceDelta
from services.ingress.calls.open_call import OpenCall


def deliver(call: OpenCall, deltas: list[ChoiceDelta], out: list[Effect]) -> None:
    """Hand deltas to the call's listener, or hold them until the call is accepted (as few as its choices' chunks)."""
    if call.accepted:
        call.listener.on_deltas(call, deltas, out)
    else:
        call.held += deltas


def deliver_held(call: OpenCall, out: list[Effect]) -> None:
    """Deliver what arrived before the call was accepted."""
    if call.held:
        held, call.held = call.held, []
        deliver(call, held, out)
