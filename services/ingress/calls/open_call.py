"""One HTTP request that was admitted, until its one end. Data only."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from millrace.contracts.observers import CandidateForecast
from millrace.telemetry.tracecontext import TraceContext, sampled_context

from services.ingress.calls.listener import Listener
from services.ingress.calls.messages import Call, ChoiceDelta, Usage
from services.ingress.sequence import OpenSequence


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call with its sequences.

    Attributes:
        listener: Who is told of its course.
        patience_ns: How long it waits for an instance of its model; None for the configured times.
        unaccepted: Sequences that no instance has accepted yet; at 0 the call is accepted.
        unended: Sequences that have not ended; at 0 the call is complete.
        held: Deltas that arrived before the call was accepted.
        tagging: Correlation of the open question to the tagger; empty for none.
        predicted: Expected output tokens, a mean; None where unknown.
        expected_output_tokens: The same as engines are told: whole tokens within the call's bounds.
        trace: Context of the root span; None where the trace is not sampled.
        placed_ns: When the latest decision before acceptance was made; predictions count from here.
        forecast: Prediction for the chosen instance; None without one, or with several prompts: none covers them all.
    """

    call: Call
    arrival_ns: int
    timeout_ns: InitVar[int]
    listener: Listener
    request: str = field(init=False)
    deadline_ns: int = field(init=False)
    patience_ns: int | None = None
    sequences: list[OpenSequence] = field(default_factory=list)
    unaccepted: int = field(init=False)
    unended: int = field(init=False)
    accepted: bool = False
    tagging: str = ""
    predicted: float | None = None
    expected_output_tokens: int | None = None
    policy: str = ""
    prompt_tokens: int = field(init=False)
    output_tokens: int = 0
    cached_tokens: int = 0
    first_token_ns: int = 0
    placed_ns: int = 0
    forecast: CandidateForecast | None = None
    continuations: int = 0
    migrations: int = 0
    instances: list[str] = field(default_factory=list)
    held: list[ChoiceDelta] = field(default_factory=list)
    trace: TraceContext | None = field(init=False)

    def __post_init__(self, timeout_ns: int) -> None:
        call = self.call
        self.request = call.request
        self.deadline_ns = self.arrival_ns + timeout_ns
        self.unaccepted = self.unended = len(call.prompts) * call.n
        self.prompt_tokens = sum(map(len, call.prompts))
        self.trace = sampled_context(call.traceparent)

    def deliver(self, deltas: list[ChoiceDelta]) -> None:
        """Hand deltas to the listener, or hold them until the call is accepted (as few as its choices' chunks)."""
        if self.accepted:
            self.listener.on_deltas(self, deltas)
        else:
            self.held += deltas

    def deliver_held(self) -> None:
        if self.held:
            held, self.held = self.held, []
            self.deliver(held)

    def usage(self) -> Usage:
        """Counts so far: each prompt once, outputs of all choices with their stop tokens."""
        return Usage(self.prompt_tokens, self.output_tokens, self.cached_tokens)
