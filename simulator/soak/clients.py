"""Simulated clients: what stands in for ingress's HTTP side, and judges every stream it gets.

Each call must end in exactly one way, and what it delivered until then must be a prefix of (or, completed, exactly)
what the run without faults gives: no token repeated, missing or out of order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.ingress.calls.messages import (
    AcceptCall,
    Call,
    CallAbandoned,
    CallSubmitted,
    CompleteCall,
    DeliverDeltas,
    FailCall,
    RefuseCall,
)
from simulator.soak.oracle import ExpectedChoice, History, Oracle

if TYPE_CHECKING:
    from millrace.sim.process import Handlers, SimProcess


class ClientExchange(msgspec.Struct):
    """One call as its client sees it.

    Attributes:
        histories: Of the choices of a call whose text is not known beforehand, only its length.
        outcome: Empty while it is open; ``completed``, ``refused:<kind>``, ``failed:<kind>``, ``abandoned`` or
            ``connection lost``.
    """

    call: Call
    process: object
    expected: list[ExpectedChoice]
    texts: list[str]
    tokens: list[int]
    finished: list[str]
    histories: list[History]
    accepted: bool = False
    outcome: str = ""
    ended_ns: int = 0


class Clients:
    """All clients of a simulated cluster."""

    def __init__(self, oracle: Oracle) -> None:
        self.exchanges: dict[str, ClientExchange] = {}
        self._oracle = oracle

    def handlers(self, process: SimProcess) -> Handlers:
        return {
            AcceptCall: self._on_accept,
            DeliverDeltas: self._on_deltas,
            CompleteCall: self._on_complete,
            RefuseCall: self._on_refuse,
            FailCall: self._on_fail,
        }

    def submit(self, process: SimProcess, call: Call) -> None:
        expected = self._oracle.choices(call)
        self.exchanges[call.request] = ClientExchange(
            call=call,
            process=process,
            expected=expected,
            texts=["" for _ in expected],
            tokens=[0 for _ in expected],
            finished=["" for _ in expected],
            histories=self._oracle.histories(call),
        )
        process.deliver(CallSubmitted(call=call), traceparent=call.traceparent)

    def abandon(self, request: str) -> None:
        """A client hangs up, unless its call has ended."""
        exchange = self.exchanges[request]
        process = _process(exchange)
        if not exchange.outcome and process.alive:
            exchange.outcome, exchange.ended_ns = "abandoned", process.now_ns
            process.deliver(CallAbandoned(request=request, reason="client_gone"))

    def lose_connections(self) -> None:
        """Calls whose ingress is gone have ended for their clients."""
        for exchange in self.exchanges.values():
            process = _process(exchange)
            if not exchange.outcome and not process.alive:
                exchange.outcome, exchange.ended_ns = "connection lost", process.now_ns

    def open(self) -> list[str]:
        """Requests that have no outcome."""
        return [request for request, exchange in self.exchanges.items() if not exchange.outcome]

    def outcomes(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for exchange in self.exchanges.values():
            counts[exchange.outcome] = counts.get(exchange.outcome, 0) + 1
        return dict(sorted(counts.items()))

    # What ingress says

    def _on_accept(self, effect: AcceptCall) -> None:
        exchange = self._open(effect.request)
        assert not exchange.accepted, f"{effect.request} was accepted twice"
        exchange.accepted = True

    def _on_deltas(self, effect: DeliverDeltas) -> None:
        exchange = self._open(effect.request)
        assert exchange.accepted, f"{effect.request} got text before it was accepted"
        for delta in effect.deltas:
            index = delta.index
            assert not exchange.finished[index], f"{effect.request} choice {index} goes on after its end"
            exchange.texts[index] += delta.text
            exchange.tokens[index] += delta.tokens
            exchange.finished[index] = delta.finish_reason
            want = exchange.expected[index]
            got = exchange.texts[index]
            if exchange.histories:
                strange = exchange.histories[index].take(delta.text)
                assert not strange, f"{effect.request} choice {index}: {strange!r} follows from nothing in {got!r}"
            else:
                said = f"{effect.request} choice {index}: {got!r} is no start of {want.text!r}"
                assert want.text.startswith(got), said
            assert exchange.tokens[index] <= want.tokens, f"{effect.request} choice {index}: too many tokens"

    def _on_complete(self, effect: CompleteCall) -> None:
        assert self._open(effect.request).accepted, f"{effect.request} completed before it was accepted"
        exchange = self._end(effect.request, "completed")
        got = [
            ExpectedChoice(text, tokens, finish)
            for text, tokens, finish in zip(exchange.texts, exchange.tokens, exchange.finished, strict=True)
        ]
        expected = exchange.expected
        if exchange.histories:
            assert [len(choice.text) for choice in got] == [len(choice.text) for choice in expected], (
                f"{got} {expected}"
            )
            expected = [
                msgspec.structs.replace(choice, text=seen.text) for choice, seen in zip(expected, got, strict=True)
            ]
        assert got == expected, f"{effect.request}: {got} instead of {expected}"
        usage = effect.usage
        assert usage.completion_tokens == sum(choice.tokens for choice in got), f"{effect.request}: {usage}"
        assert usage.prompt_tokens == sum(map(len, exchange.call.prompts)), f"{effect.request}: {usage}"

    def _on_refuse(self, effect: RefuseCall) -> None:
        assert not self._open(effect.request).accepted, f"{effect.request} was refused after it was accepted"
        self._end(effect.request, f"refused:{effect.kind}")

    def _on_fail(self, effect: FailCall) -> None:
        assert self._open(effect.request).accepted, f"{effect.request} failed before it was accepted"
        self._end(effect.request, f"failed:{effect.kind}")

    def _open(self, request: str) -> ClientExchange:
        exchange = self.exchanges[request]
        assert not exchange.outcome, f"{request} has ended already ({exchange.outcome})"
        return exchange

    def _end(self, request: str, outcome: str) -> ClientExchange:
        exchange = self._open(request)
        exchange.outcome, exchange.ended_ns = outcome, _process(exchange).now_ns
        return exchange


def _process(exchange: ClientExchange) -> SimProcess:
    return exchange.process  # type: ignore[return-value]
