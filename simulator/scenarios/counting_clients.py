"""Clients of a scenario: they send, and count how their calls end. Content is not looked at (soak/clients.py does)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.ingress.calls.messages import (
    AcceptCall,
    Call,
    CallSubmitted,
    CompleteCall,
    DeliverDeltas,
    FailCall,
    RefuseCall,
)

if TYPE_CHECKING:
    from millrace.sim.process import Handlers, SimProcess


class CountingClients:
    """All clients of a scenario.

    Attributes:
        outcomes: How often each outcome came: ``completed``, ``refused:<kind>``, ``failed:<kind>``.
        details: The first detail of each refusal and failure, for people.
    """

    def __init__(self) -> None:
        self.submitted = 0
        self.outcomes: dict[str, int] = {}
        self.details: dict[str, str] = {}

    def handlers(self, process: SimProcess) -> Handlers:
        return {
            AcceptCall: _nothing,
            DeliverDeltas: _nothing,
            CompleteCall: self._on_complete,
            RefuseCall: self._on_refuse,
            FailCall: self._on_fail,
        }

    def submit(self, process: SimProcess, call: Call) -> None:
        self.submitted += 1
        process.deliver(CallSubmitted(call=call))

    @property
    def ended(self) -> int:
        return sum(self.outcomes.values())

    def _on_complete(self, effect: CompleteCall) -> None:
        self._count("completed", "")

    def _on_refuse(self, effect: RefuseCall) -> None:
        self._count(f"refused:{effect.kind.value}", effect.detail)

    def _on_fail(self, effect: FailCall) -> None:
        self._count(f"failed:{effect.kind.value}", effect.detail)

    def _count(self, outcome: str, detail: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if detail:
            self.details.setdefault(outcome, detail)


def _nothing(effect: object) -> None:
    """Text is not looked at."""
