"""Context that the parts of a migrator work with, and the small effects that they share."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from millrace.actor.effects import Effect, Publish, Reply
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import KvRefused
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body, ErrorReply
from millrace.contracts.sequences import request_id_of
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import SequenceRefused

from services.migrator.config import MigratorConfig, MigratorLimits
from services.migrator.metrics import MigratorMetrics
from services.migrator.records import KnownInstances

MS = 1_000_000

#: First part of the correlations of migrations and of replicas.
OUT, REPLICA = "out", "replica"


#: Why something did not happen, with a sentence for a person.
Refusal = tuple[KvRefusal, str]


@dataclass
class MigratorContext:
    """Shared by the parts of one actor."""

    config: MigratorConfig
    subjects: Subjects
    rng: Random
    records: KnownInstances
    metrics: MigratorMetrics

    @property
    def limits(self) -> MigratorLimits:
        return self.config.limits


def say(subject: str, body: Body, sequence: str, traceparent: str) -> Effect:
    """A message without an answer."""
    return Publish(subject=subject, body=body, request=request_id_of(sequence), traceparent=traceparent)


def answer_to(reply_to: str, body: Body, sequence: str) -> list[Effect]:
    """The answer, where somebody waits for it."""
    return [Reply(to=reply_to, body=body, request=request_id_of(sequence))] if reply_to else []


def refusal_of(body: Body | RequestFailure, step: str) -> Refusal:
    """Reason and detail of a refusal. A missing answer counts as UNANSWERED, an answer of a wrong kind as INVALID."""
    match body:
        case KvRefused(reason=reason, detail=detail):
            return reason, detail
        case SequenceRefused(reason=refused, detail=detail):
            return KvRefusal.TARGET_REFUSED, f"{refused}: {detail}" if detail else str(refused)
        case ErrorReply(reason=why, detail=detail):
            return KvRefusal.INVALID, f"{step}: {why} {detail}"
        case RequestFailure():
            return KvRefusal.UNANSWERED, f"{step}: {body}"
        case _:
            return KvRefusal.INVALID, f"{step}: {body.type_name()} came"
