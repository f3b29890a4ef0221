"""One call of a cascade, from admission to its end: its attempts and what is known of them. Data only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from millrace.contracts.observers import CascadeAttempt
from millrace.telemetry.tracecontext import sampled_context

from services.ingress.calls.limits import Refusal
from services.ingress.calls.messages import AttemptReport, Call, CascadeReport, ChoiceDelta, Usage
from services.ingress.cascade.lifecycle import (
    CASCADE_TRANSITIONS,
    CascadeEvent,
    CascadeGuard,
    CascadePhase,
    CascadeReaction,
    DeliveryReason,
)

if TYPE_CHECKING:
    from services.ingress.calls.open_call import OpenCall
    from services.ingress.cascade.plans import ServedCascade


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
        span: Trace context of the attempt.
    """

    __slots__ = (
        "again",
        "bound",
        "call",
        "deltas",
        "detail",
        "ended_ns",
        "epoch",
        "judged_by",
        "model",
        "outcome",
        "reason",
        "request",
        "score",
        "span",
        "started_ns",
        "streams",
        "threshold",
        "tier",
    )

    def __init__(self, request: str, *, tier: int, model: str, epoch: int, now_ns: int) -> None:
        self.request = request
        self.tier = tier
        self.model = model
        self.epoch = epoch
        self.started_ns = now_ns
        self.ended_ns = 0
        self.call: OpenCall | None = None
        self.streams = False
        self.reason = DeliveryReason.LAST_TIER
        self.again = False
        self.bound: float | None = None
        self.deltas: list[ChoiceDelta] = []
        self.outcome = ""
        self.score: float | None = None
        self.judged_by = ""
        self.threshold: float | None = None
        self.detail = ""
        self.span = ""

    @property
    def complete(self) -> bool:
        """Whether there is a whole answer that can be delivered."""
        return self.outcome in ("complete", "rejected")

    def usage(self) -> Usage:
        """Counts of its call so far."""
        return Usage(0, 0) if self.call is None else self.call.usage()

    def texts(self) -> list[str]:
        """Text of each choice that was not yet delivered."""
        assert self.call is not None
        texts = [""] * len(self.call.sequences)
        for delta in self.deltas:
            texts[delta.index] += delta.text
        return texts

    def told(self) -> CascadeAttempt:
        """As it is published."""
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

    def report(self) -> AttemptReport:
        """As clients see it."""
        return AttemptReport(
            tier=self.tier,
            model=self.model,
            outcome=self.outcome,
            score=self.score,
            threshold=self.threshold,
            usage=self.usage(),
        )


class OpenCascade:
    """A call of a cascade with its attempts.

    Attributes:
        served: Its cascade.
        members: The request as each model takes it.
        phase: State in ``cascade/lifecycle.py``; changed by ``advance`` only.
        events: Of its attempts, in order; handled after the message that caused them, when their books are closed.
        progressed: Tokens or deltas of the current attempt arrived that may settle who answers.
        asking: Correlation of the open question to the judge; empty for none.
        entry: Why it entered where it did.
        last: Highest tier that is asked for a better answer, by the entry policy; None for the plan's last.
        accepted: An instance has accepted an attempt: the call has an outcome.
        refusal: Of the latest attempt that failed.
        first_ns: When the first text was delivered; 0 before.
    """

    __slots__ = (
        "_phase",
        "accepted",
        "arrival_ns",
        "asking",
        "attempts",
        "call",
        "deadline_ns",
        "entry",
        "events",
        "first_ns",
        "last",
        "members",
        "progressed",
        "refusal",
        "request",
        "served",
        "trace",
    )

    def __init__(self, call: Call, served: ServedCascade, now_ns: int, timeout_ns: int) -> None:
        self.call = call
        self.request = call.request
        self.served = served
        self.members = {member.model: member for member in call.members}
        self.arrival_ns = now_ns
        self.deadline_ns = now_ns + timeout_ns
        self._phase = CascadePhase.ATTEMPTING
        self.attempts: list[Attempt] = []
        self.events: deque[tuple[Attempt, CascadeEvent]] = deque()
        self.progressed = False
        self.asking = ""
        self.entry = ""
        self.last: int | None = None
        self.accepted = False
        self.refusal: Refusal | None = None
        self.first_ns = 0
        self.trace = sampled_context(call.traceparent)

    @property
    def phase(self) -> CascadePhase:
        """Its state."""
        return self._phase

    @property
    def attempt(self) -> Attempt:
        """The current, or last, attempt."""
        return self.attempts[-1]

    @property
    def choices(self) -> int:
        """Number of choices over all prompts."""
        return len(self.call.prompts) * self.call.n

    def advance(self, event: CascadeEvent, holds: Callable[[CascadeGuard], bool]) -> CascadeReaction:
        """Take the transition of an event and return its reaction.

        Raises:
            TransitionRefused: the table lists none.
        """
        row = CASCADE_TRANSITIONS.take(self._phase, type(event), holds, who=self.request)
        self._phase = row.target
        return row.reaction

    def best(self) -> Attempt | None:
        """The complete attempt of the highest score; of equal ones, and without scores, the latest."""
        complete = [attempt for attempt in self.attempts if attempt.complete]
        return max(complete, key=lambda a: (-1.0 if a.score is None else a.score, a.tier), default=None)

    def report(self, delivered: Attempt) -> CascadeReport:
        """As clients see it."""
        return CascadeReport(
            name=self.call.model,
            tier=delivered.tier,
            model=delivered.model,
            score=delivered.score,
            reason=delivered.reason.value,
            attempts=[attempt.report() for attempt in self.attempts],
        )
