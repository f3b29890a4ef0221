"""Observer of a scenario: an actor that hears how requests and migrations ended, as `millrace tap` does."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.effects import Effect, Subscribe
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrationFinished
from millrace.contracts.observers import RequestFinished
from millrace.contracts.subjects import Subjects

ACCEPTS = (RequestFinished, MigrationFinished)


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request that ended. Times in ns; -1 where there is none.

    Attributes:
        number: Of the request in the workload.
        arrival_ns: From the beginning of the workload.
        predicted_tokens: What the tagger said.
        predicted_ttft_ns, predicted_e2e_ns: What the forecast of the chosen instance said.
        instance: The last one.
        predicted_cached_tokens: What that forecast took as cached; -1 without one.
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
    predicted_cached_tokens: int = -1
    model: str = ""


class MigrationRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One migration that ended, as its migrator reported it (see MigrationFinished). Times in ns.

    Attributes:
        at_ns: When it was heard, from the beginning of the workload.
        outcome: With the refusal behind it where there was one.
        tokens: Length when it was frozen; 0 where it was not.
    """

    at_ns: int
    outcome: str
    reason: str
    source: str
    target: str
    tokens: int
    bytes: int
    rounds: int
    frozen_ns: int
    duration_ns: int


class EngineSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    """Owns the records of requests and migrations."""

    def __init__(self, *, name: str, cluster: str, begin_ns: int, migrations: bool = False) -> None:
        """Args:
        begin_ns: Beginning of the workload, unix ns of virtual time.
        migrations: Whether any are to be heard. A subscription for nothing would change trace hashes.
        """
        self.name = name
        self.finished: list[FinishedRequest] = []
        self.migrations: list[MigrationRecord] = []
        self._subjects = Subjects(cluster)
        self._begin_ns = begin_ns
        self._hears_migrations = migrations

    def start(self, now_ns: int) -> list[Effect]:
        subjects = [self._subjects.outcomes()] + ([self._subjects.migrations()] if self._hears_migrations else [])
        return [Subscribe(subject=subject) for subject in subjects]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        if isinstance(message.body, RequestFinished):
            self._on_finished(message.body)
        elif isinstance(message.body, MigrationFinished):
            self.migrations.append(_migration(message.body, now_ns - self._begin_ns))
        return []

    def _on_finished(self, body: RequestFinished) -> None:
        self.finished.append(
            FinishedRequest(
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
                -1 if body.predicted_cached_tokens is None else body.predicted_cached_tokens,
                body.model,
            )
        )

    def snapshot(self) -> dict[str, Any]:
        return {"name": self.name, "finished": len(self.finished), "migrations": len(self.migrations)}

    def check_invariants(self) -> None:
        assert len({record.number for record in self.finished}) == len(self.finished)


def _migration(body: MigrationFinished, at_ns: int) -> MigrationRecord:
    return MigrationRecord(
        at_ns,
        f"{body.outcome} {body.refusal}" if body.refusal else str(body.outcome),
        str(body.reason),
        body.source,
        body.target,
        body.cost.tokens,
        body.cost.bytes,
        body.cost.rounds,
        body.cost.frozen_ns,
        body.cost.duration_ns,
    )


def _offset(predicted_ns: int | None, body: RequestFinished) -> int:
    """A prediction, which counts from the placement, as counted from the arrival; -1 without one."""
    return -1 if predicted_ns is None else predicted_ns + max(0, body.placed_ns - body.arrival_ns)
