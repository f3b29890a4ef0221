"""Filter of the instances that may take a sequence at all, before any policy chooses."""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec

from millrace.contracts.kv import KvEndpoint
from millrace.contracts.observers import CandidateScore
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.policies.migration.view import TargetView


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """Knowledge that a migrator has of another instance.

    Attributes:
        summary: The last one of its present incarnation; None where none was heard, or long ago.
        blocks_promised, arriving: As in TargetView.
    """

    record: InstanceRecord
    summary: InstanceSummary | None = None
    role: InstanceRole = InstanceRole.BOTH
    blocks_promised: int = 0
    arriving: int = 0


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements on a target.

    Attributes:
        blocks: Needed there; None to ask who could take a sequence however little room there is.
        recompute: No KV travels: fingerprints and copiers do not matter.
        excluded: Instances that have refused this very sequence already.
    """

    source: InstanceRecord
    blocks: int | None
    recompute: bool = False
    excluded: Set[str] = frozenset()


def obstacle(wish: Wish, neighbour: Neighbour) -> str:
    """Return the reason why this instance cannot take the sequence; empty if it can."""
    record, summary, kv = neighbour.record, neighbour.summary, wish.source.kv
    if record.instance == wish.source.instance:
        return "the source"
    if record.model != wish.source.model:
        return "other model"
    if record.instance in wish.excluded:
        return "refused it"
    if neighbour.role is InstanceRole.PREFILL:
        return "prefill only"
    if summary is None:
        return "not heard"
    if summary.draining:
        return "draining"
    if not wish.recompute and not compatible(kv, record.kv):
        return record.kv_refusal or "KV does not fit"
    if wish.blocks is not None and summary.blocks_free - neighbour.blocks_promised < wish.blocks:
        return "no room"
    return ""


def compatible(source: KvEndpoint | None, target: KvEndpoint | None) -> bool:
    """Whether KV can move between two endpoints: both have some, of one fingerprint, with a copier in common."""
    if source is None or target is None or source.fingerprint != target.fingerprint:
        return False
    return not set(source.copiers).isdisjoint(target.copiers)


def sifted(wish: Wish, neighbours: Iterable[Neighbour]) -> tuple[tuple[TargetView, ...], tuple[CandidateScore, ...]]:
    """Those that may take it and those that may not, each in order of name; the source itself is not told of."""
    candidates: list[TargetView] = []
    filtered: list[CandidateScore] = []
    for neighbour in sorted(neighbours, key=lambda each: each.record.instance):
        name, why = neighbour.record.instance, obstacle(wish, neighbour)
        if not why:
            candidates.append(_view(wish, neighbour))
        elif name != wish.source.instance and neighbour.record.model == wish.source.model:
            filtered.append(CandidateScore(name, 0.0, why))
    return tuple(candidates), tuple(filtered)


def _view(wish: Wish, neighbour: Neighbour) -> TargetView:
    summary = neighbour.summary
    assert summary is not None, "an instance without a summary is no candidate"
    source, target = wish.source.kv, neighbour.record.kv
    return TargetView(
        name=neighbour.record.instance,
        blocks_free=summary.blocks_free,
        blocks_total=summary.blocks_total,
        blocks_promised=neighbour.blocks_promised,
        role=neighbour.role,
        same_machine=bool(source and target and source.machine and source.machine == target.machine),
        waiting=summary.waiting,
        running=summary.running,
        arriving=neighbour.arriving,
    )
