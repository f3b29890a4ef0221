"""What watches a scenario: an actor that listens as `millrace tap` does, and keeps figures of what it hears."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.actor.effects import Effect, Subscribe
from millrace.contracts.message import Message
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import InstanceSummary
from millrace.contracts.subjects import Subjects

ACCEPTS = (RequestFinished, DecisionMade, InstanceSummary)


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request that ended. Times in ns; -1 where there is none.

    Attributes:
        number: Of the request in the workload.
        arrival_ns: From the beginning of the workload.
        predicted_tokens: What the tagger said.
        predicted_ttft_ns, predicted_e2e_ns: What the forecast of the chosen instance said.
        instance: The last one.
    """

    number: int
    outcome: str
    arrival_ns: int
    ttft_ns: int
    e2e_ns: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    continuations: int
    predicted_tokens: float
    predicted_ttft_ns: int
    predicted_e2e_ns: int
    instance: str


class Sample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One instance at one time."""

    at_ns: int
    instance: str
    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    preemptions: int
    output_tokens_total: int


class Observer:
    """Owns the records. ``sample_ns``: summaries of one instance are kept at most so often."""

    def __init__(self, *, name: str, cluster: str, begin_ns: int, sample_ns: int) -> None:
        self.name = name
        self.finished: list[Finished] = []
        self.samples: list[Sample] = []
        self.decided: dict[str, int] = {}
        self.fallbacks = 0
        self._subjects = Subjects(cluster)
        self._begin_ns = begin_ns
        self._sample_ns = sample_ns
        self._sampled_ns: dict[str, int] = {}

    def start(self, now_ns: int) -> list[Effect]:
        """Listens to outcomes, decisions and summaries of every model."""
        prefix = self._subjects.prefix
        return [
            Subscribe(subject=f"{prefix}.outcome.*"),
            Subscribe(subject=f"{prefix}.decision.*"),
            Subscribe(subject=self._subjects.summaries()),
        ]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """Keeps what it hears; says nothing."""
        body = message.body
        if isinstance(body, InstanceSummary):
            self._on_summary(body)
        elif isinstance(body, RequestFinished):
            self._on_finished(body)
        elif isinstance(body, DecisionMade):
            self.decided[body.policy] = self.decided.get(body.policy, 0) + 1
            self.fallbacks += bool(body.fallback)
        return []

    def _on_finished(self, body: RequestFinished) -> None:
        self.finished.append(
            Finished(
                int(body.request[1:]),
                body.outcome,
                body.arrival_ns - self._begin_ns,
                -1 if body.ttft_ns is None else body.ttft_ns,
                body.e2e_ns,
                body.prompt_tokens,
                sum(body.output_tokens),
                body.cached_tokens,
                body.continuations,
                -1.0 if body.predicted_output_tokens is None else body.predicted_output_tokens,
                _offset(body.predicted_ttft_ns, body),
                _offset(body.predicted_e2e_ns, body),
                body.instances[-1] if body.instances else "",
            )
        )

    def _on_summary(self, body: InstanceSummary) -> None:
        if body.at_ns - self._sampled_ns.get(body.instance, 0) < self._sample_ns or body.at_ns < self._begin_ns:
            return
        self._sampled_ns[body.instance] = body.at_ns
        self.samples.append(
            Sample(
                body.at_ns - self._begin_ns,
                body.instance,
                body.running,
                body.waiting,
                body.blocks_total - body.blocks_free,
                body.blocks_total,
                body.preemptions,
                body.output_tokens_total,
            )
        )

    def snapshot(self) -> dict[str, Any]:
        """How much was kept."""
        return {"name": self.name, "finished": len(self.finished), "samples": len(self.samples)}

    def check_invariants(self) -> None:
        """Every request ends once."""
        assert len({record.number for record in self.finished}) == len(self.finished)


def _offset(predicted_ns: int | None, body: RequestFinished) -> int:
    """A prediction, which counts from the placement, as counted from the arrival; -1 without one."""
    return -1 if predicted_ns is None else predicted_ns + max(0, body.placed_ns - body.arrival_ns)
