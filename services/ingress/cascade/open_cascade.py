"""One call of a cascade, from admission to its end: its attempts and what is known of them. Data only."""

from __future__ import annotations

from collections import deque
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

from millrace.contracts.observers import CascadeAttempt
from millrace.telemetry.tracecontext import TraceContext, sampled_context

from services.ingress.calls.limits import Refusal
from services.ingress.calls.messages import Call, CascadeReport, ChoiceDelta, Usage
from services.ingress.cascade.lifecycle import CascadeEvent, CascadePhase, DeliveryReason

if TYPE_CHECKING:
    from services.ingress.calls.open_call import OpenCall
    from services.ingress.cascade.plans import ServedCascade


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One member model's try.

    Attributes:
        request: ``<parent>~<number>``, numbers from 1.
        tier: Position of its model in the plan when it began.
        call: The child call; kept after its end for its counts.
        streams: Its deltas go to the client as they come, once there is text: nothing may follow it.
        reason: Why it will be delivered; meaningful with ``streams`` and once it is delivered.
        again: It runs a tier to its end that was rejected early, because no later one could answer.
        bound: Raw evidence below which it cannot reach its threshold; None where that is not known.
        deltas: What was not yet delivered.
        outcome: As in ``CascadeAttempt``; empty while it is open, ``complete`` until it is delivered or rejected.
        score, judged_by, threshold, epoch, detail: As in ``CascadeAttempt``.
    """

    request: str
    tier: int
    model: str
    epoch: int
    started_ns: int
    ended_ns: int = 0
    call: OpenCall | None = None
    streams: bool = False
    reason: DeliveryReason = DeliveryReason.LAST_TIER
    again: bool = False
    bound: float | None = None
    deltas: list[ChoiceDelta] = field(default_factory=list)
    outcome: str = ""
    score: float | None = None
    judged_by: str = ""
    threshold: float | None = None
    detail: str = ""
    span: str = ""

    @property
    def complete(self) -> bool:
        """Whether there is a whole answer that can be delivered."""
        return self.outcome in ("complete", "rejected")

    def usage(self) -> Usage:
        return Usage(0, 0) if self.call is None else self.call.usage()

    def texts(self) -> list[str]:
        """Text of each choice that was not yet delivered."""
        assert self.call is not None
        texts = [""] * len(self.call.sequences)
        for delta in self.deltas:
            texts[delta.index] += delta.text
        return texts

    def told(self) -> CascadeAttempt:
        usage = self.usage()
        return CascadeAttempt(
            request=self.request,
            tier=self.tier,
            model=self.model,
            outcome=self.outcome,
            score=self.score,
            judge=self.judged_by,
            threshold=self.threshold,
            epoch=self.epoch,
            detail=self.detail,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
        )


@dataclass(slots=True, eq=False)
class OpenCascade:
    """A call of a cascade with its attempts.

    Attributes:
        members: The request as each model takes it.
        phase: State in ``cascade/lifecycle.py``; changed by ``cascade/reactions.py`` only.
        events: Of its attempts, in order; handled after the message that caused them, when their books are closed.
        progressed: Tokens or deltas of the current attempt arrived that may settle who answers.
        asking: Correlation of the open question to the judge; empty for none.
        entry: Why it entered where it did.
        last: Highest tier that is asked for a better answer, by the entry policy; None for the plan's last.
        accepted: An instance has accepted an attempt: the call has an outcome.
        refusal: Of the latest attempt that failed.
        first_ns: When the first text was delivered; 0 before.
    """

    call: Call
    served: ServedCascade
    arrival_ns: int
    timeout_ns: InitVar[int]
    request: str = field(init=False)
    members: dict[str, Call] = field(init=False)
    deadline_ns: int = field(init=False)
    phase: CascadePhase = CascadePhase.ATTEMPTING
    attempts: list[Attempt] = field(default_factory=list)
    events: deque[tuple[Attempt, CascadeEvent]] = field(default_factory=deque)
    progressed: bool = False
    asking: str = ""
    entry: str = ""
    last: int | None = None
    accepted: bool = False
    refusal: Refusal | None = None
    first_ns: int = 0
    trace: TraceContext | None = field(init=False)

    def __post_init__(self, timeout_ns: int) -> None:
        self.request = self.call.request
        self.members = {member.model: member for member in self.call.members}
        self.deadline_ns = self.arrival_ns + timeout_ns
        self.trace = sampled_context(self.call.traceparent)

    @property
    def attempt(self) -> Attempt:
        return self.attempts[-1]

    @property
    def choices(self) -> int:
        return len(self.call.prompts) * self.call.n

    def best(self) -> Attempt | None:
        """The complete attempt of the highest score; of equal ones, and without scores, the latest."""
        complete = [attempt for attempt in self.attempts if attempt.complete]
        return max(complete, key=lambda a: (-1.0 if a.score is None else a.score, a.tier), default=None)

    def report(self, delivered: Attempt) -> CascadeReport:
        return CascadeReport(
            name=self.call.model,
            tier=delivered.tier,
            model=delivered.model,
            score=delivered.score,
            reason=delivered.reason.value,
            attempts=[attempt.told() for attempt in self.attempts],
            usages=[attempt.usage() for attempt in self.attempts],
        )
