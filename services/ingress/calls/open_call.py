"""One HTTP request that was admitted, until its one end. Data only."""

from __future__ import annotations

from typing import Any

from millrace.contracts.observers import CandidateForecast
from millrace.telemetry.tracecontext import sampled_context

from services.ingress.calls.listener import Listener
from services.ingress.calls.messages import Call, ChoiceDelta, Usage
from services.ingress.sequence import OpenSequence


class OpenCall:
    """A call with its sequences.

    Attributes:
        listener: Who is told of its course.
        patience_ns: How long it waits for an instance of its model; None for the configured times.
        unaccepted: Sequences that no instance has accepted yet; at 0 the call is accepted.
        unended: Sequences that have not ended; at 0 the call is complete.
        held: Deltas that arrived before the call was accepted.
        touched, settling: Deltas of the bus message being handled, and what became of its chunks; only for calls
            with several choices.
        tagging: Correlation of the open question to the tagger; empty for none.
        predicted: Expected output tokens, a mean; None where unknown.
        expected_output_tokens: The same as engines are told: whole tokens within the call's bounds.
        trace: Context of the root span; None where the trace is not sampled.
        placed_ns: When the latest decision before acceptance was made; predictions count from here.
        forecast: Prediction for the chosen instance; None without one, or with several prompts: none covers them all.
    """

    __slots__ = (
        "accepted",
        "arrival_ns",
        "cached_tokens",
        "call",
        "continuations",
        "deadline_ns",
        "expected_output_tokens",
        "first_token_ns",
        "forecast",
        "held",
        "instances",
        "listener",
        "migrations",
        "output_tokens",
        "patience_ns",
        "placed_ns",
        "policy",
        "predicted",
        "prompt_tokens",
        "request",
        "sequences",
        "settling",
        "several",
        "tagging",
        "touched",
        "trace",
        "unaccepted",
        "unended",
    )

    def __init__(self, call: Call, now_ns: int, timeout_ns: int, listener: Listener) -> None:
        self.call = call
        self.listener = listener
        self.patience_ns: int | None = None
        self.request = call.request
        self.arrival_ns = now_ns
        self.deadline_ns = now_ns + timeout_ns
        self.sequences: list[OpenSequence] = []
        self.unaccepted = self.unended = len(call.prompts) * call.n
        self.several = self.unended > 1
        self.accepted = False
        self.tagging = ""
        self.predicted: float | None = None
        self.expected_output_tokens: int | None = None
        self.policy = ""
        self.prompt_tokens = sum(map(len, call.prompts))
        self.output_tokens = 0
        self.cached_tokens = 0
        self.first_token_ns = 0
        self.placed_ns = 0
        self.forecast: CandidateForecast | None = None
        self.continuations = 0
        self.migrations = 0
        self.instances: list[str] = []
        self.held: list[ChoiceDelta] = []
        self.touched: list[ChoiceDelta] = []
        self.settling: list[tuple[OpenSequence, Any]] = []
        self.trace = sampled_context(call.traceparent)

    def deliver(self, deltas: list[ChoiceDelta]) -> None:
        """Hand deltas to the listener, or hold them until the call is accepted (as few as its choices' chunks)."""
        if self.accepted:
            self.listener.on_deltas(self, deltas)
        else:
            self.held += deltas

    def deliver_held(self) -> None:
        """Deliver what arrived before the call was accepted."""
        if self.held:
            held, self.held = self.held, []
            self.deliver(held)

    def usage(self) -> Usage:
        """Counts so far: each prompt once, outputs of all choices with their stop tokens."""
        return Usage(self.prompt_tokens, self.output_tokens, self.cached_tokens)
