"""Instances that a migrator knows, the context that its parts share, and a few small effects."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from random import Random

from millrace.actor.effects import Effect, Publish
from millrace.contracts.broker import LoadReported
from millrace.contracts.kv import KvRefusal, compatible
from millrace.contracts.leases import KvRefused
from millrace.contracts.local import KeyChanged, RequestFailure
from millrace.contracts.message import Body, ErrorReply
from millrace.contracts.plan import InstanceRole, Plan
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import InstanceRecord
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import SequenceRefused
from millrace.policies.trading.view import lightest, load_view

from services.migrator.config import MigratorConfig, MigratorLimits
from services.migrator.metrics import MigratorMetrics

MS = 1_000_000

#: First part of the correlations of migrations and of replicas.
OUT, REPLICA = "out", "replica"

#: Why something did not happen, with a sentence for a person.
Refusal = tuple[KvRefusal, str]

#: Instances and models that are known.
INSTANCES_MAX, MODELS_MAX = 4_096, 256

#: A load that is older does not count: three are missing.
LOAD_AGE_NS = 1_500 * MS


class KnownInstances:
    """Instances of the cluster as one migrator sees them."""

    def __init__(self) -> None:
        self._records: dict[str, InstanceRecord] = {}
        self._prefill: dict[str, set[str]] = {}  # by model, those that only prefill
        self._loads: dict[str, tuple[int, LoadReported]] = {}

    def on_key(self, body: KeyChanged) -> None:
        value = body.value
        if body.bucket == "plan":
            if isinstance(value, Plan) and (body.key in self._prefill or len(self._prefill) < MODELS_MAX):
                roles = [(name, role) for stage in value.stages for name, role in stage.roles.items()]
                self._prefill[body.key] = {name for name, role in roles if role is InstanceRole.PREFILL}
            return
        if value is None:
            self._records.pop(body.key, None)
            self._loads.pop(body.key, None)
        elif isinstance(value, InstanceRecord) and (body.key in self._records or len(self._records) < INSTANCES_MAX):
            self._records[body.key] = value

    def on_load(self, body: LoadReported, now_ns: int) -> None:
        """Load of an instance; of one that is not registered it is not kept."""
        if body.instance in self._records:
            self._loads[body.instance] = (now_ns, body)

    def get(self, instance: str) -> InstanceRecord | None:
        return self._records.get(instance)

    def prefills(self, instance: str) -> bool:
        record = self._records.get(instance)
        return record is not None and instance in self._prefill.get(record.model, ())

    def holder(self, source: InstanceRecord, blocks: int, avoided: Set[str], now_ns: int) -> InstanceRecord | None:
        """The instance with most room for a replica, as brokers choose whom to ask; None where nobody has any."""
        barred = avoided | self._prefill.get(source.model, set()) | {source.instance}
        loads = [
            load_view(load)
            for name, (heard_ns, load) in self._loads.items()
            if name not in barred and now_ns - heard_ns < LOAD_AGE_NS and not load.draining and self._fits(name, source)
        ]
        found = lightest(loads, blocks=blocks, count=1)
        return self._records.get(found[0].name) if found else None

    def _fits(self, name: str, source: InstanceRecord) -> bool:
        record = self._records.get(name)
        return record is not None and record.model == source.model and compatible(source.kv, record.kv)


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
