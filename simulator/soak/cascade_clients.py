"""Clients of a cascade: what they get must be the text of the one model that is said to answer."""

from __future__ import annotations

import msgspec

from services.ingress.calls.messages import AcceptCall, CompleteCall
from simulator.soak.clients import Clients


class CascadeClients(Clients):
    """Clients that know what each model would say."""

    def _on_accept(self, effect: AcceptCall) -> None:
        super()._on_accept(effect)
        exchange = self._open(effect.request)
        if not exchange.call.members:
            assert effect.answering is None
            return
        assert effect.answering is not None, f"{effect.request}: nobody is said to answer"
        name = effect.answering.model
        member = next(member for member in exchange.call.members if member.model == name)
        exchange.call = msgspec.structs.replace(exchange.call, prompts=member.prompts, sampling=member.sampling)
        exchange.expected = self._oracle.choices(exchange.call)
        exchange.histories = self._oracle.histories(exchange.call)

    def _on_complete(self, effect: CompleteCall) -> None:
        exchange = self._open(effect.request)
        super()._on_complete(effect)
        if not exchange.call.members:
            return
        report = effect.report
        assert report is not None, f"{effect.request} has no report"
        pairs = zip(report.attempts, report.usages, strict=True)
        delivered = [(attempt.model, usage) for attempt, usage in pairs if attempt.outcome == "delivered"]
        assert delivered == [(report.model, effect.usage)], f"{effect.request}: {report}"
