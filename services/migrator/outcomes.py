"""Whether a migration may be tried at all, and how it ended. Pure."""

from __future__ import annotations

from millrace.contracts.kv import KvRefusal
from millrace.contracts.migration import MigrationMode, MigrationOutcome
from millrace.contracts.status import InstanceRecord
from millrace.policies.migration import compatible

from services.migrator.state import OutgoingMigration, OutgoingStep

#: Why something did not happen, with a sentence for a person.
Refusal = tuple[KvRefusal, str]


def wrong_source(out: OutgoingMigration, source: InstanceRecord | None) -> Refusal | None:
    """Reason why nothing can leave its source."""
    if source is None:
        return KvRefusal.UNABLE, f"{out.source} is not registered"
    if source.kv is None:
        return KvRefusal.UNABLE, source.kv_refusal or f"{out.source} moves nothing"
    return None


def wrong_target(out: OutgoingMigration, source: InstanceRecord, target: InstanceRecord | None) -> Refusal | None:
    """Reason why the named target cannot take it."""
    if out.wanted == out.source:
        return KvRefusal.INVALID, "source and target are the same"
    if target is None:
        return KvRefusal.NO_TARGET, f"{out.wanted} is not registered"
    if target.model != source.model:
        return KvRefusal.INCOMPATIBLE, f"{out.wanted} serves {target.model}"
    if out.mode is not MigrationMode.RECOMPUTE and not compatible(source.kv, target.kv):
        return KvRefusal.INCOMPATIBLE, target.kv_refusal or f"KV of {out.wanted} is of another kind"
    return None


def failed(step: OutgoingStep, reason: KvRefusal) -> MigrationOutcome:
    """Outcome of a failure at a step: a refused freeze has frozen nothing; an unanswered one may have."""
    frozen = step is OutgoingStep.COMMITTING or (step is OutgoingStep.FREEZING and reason is KvRefusal.UNANSWERED)
    return MigrationOutcome.ABORTED if frozen else MigrationOutcome.REFUSED
