"""A migration as `millrace tap` tells it: what matters in each message of the handshake. Pure.

A migration is named by the first digits of its id, after ``~``; ``[3,17)`` are positions of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from millrace.cli.broker_summaries import ask_name
from millrace.cli.field_text import duration, shown_fields
from millrace.contracts.leases import (
    EndLease,
    FreezeSequence,
    KvLeased,
    KvPulled,
    KvRefused,
    LeaseKv,
    MigrationPrepared,
    PrepareMigration,
    PullKv,
    SequenceFrozen,
    UnreserveKv,
)
from millrace.contracts.message import Body
from millrace.contracts.migration import (
    AllotEpoch,
    EpochAllotted,
    EpochRefused,
    EvacuateInstance,
    InstanceEvacuated,
    KvReplicated,
    MigrateSequence,
    MigrationFinished,
    MoveSequence,
    SequenceMoved,
)

B = TypeVar("B", bound=Body)

#: Digits of a migration's id that are shown: enough to tell apart those of one screen.
ID_DIGITS = 6


def _name(migration: str) -> str:
    return f"~{migration[:ID_DIGITS]}"


def _span(first: int, count: int) -> str:
    return f"[{first},{first + count})"


def _size(size: int) -> str:
    return f"{size / 2**20:.2f}MiB"


def _migrate(body: MigrateSequence) -> str:
    mode = f" {body.mode}" if body.mode is not None else ""
    return f"to {body.target or 'wherever there is room'}{mode}, within {body.within_ms}ms"


def _move(body: MoveSequence) -> str:
    award = f", award of {ask_name(body.award)}" if body.award else ""
    return f"to {body.target}: {body.reason}{award}; {body.note}"


def _evacuate(body: EvacuateInstance) -> str:
    return f"everything leaves within {body.limit_ms}ms"


def _evacuated(body: InstanceEvacuated) -> str:
    left = "; ".join(f"{count} left: {why}" for why, count in body.left.items()) or "nothing left"
    return f"{body.instance}: {body.moved} moved, {body.failed} attempts failed, {body.returned} handed back; {left}"


def _lease(body: LeaseKv) -> str:
    return f"{_name(body.migration)} from block {body.from_block} for {body.lease_ms}ms"


def _leased(body: KvLeased) -> str:
    return (
        f"{_name(body.migration)} epoch={body.epoch} blocks={_span(body.from_block, len(body.blocks))} "
        f"prompt={body.prompt_tokens} output={body.output_tokens}"
    )


def _allot(body: AllotEpoch) -> str:
    return f"{_name(body.migration)} {body.source} → {body.target}, after epoch {body.epoch}"


def _allotted(body: EpochAllotted) -> str:
    return f"{_name(body.migration)} epoch={body.epoch}"


def _no_epoch(body: EpochRefused) -> str:
    return f"{_name(body.migration)} no: {body.detail}"


def _prepare(body: PrepareMigration) -> str:
    what = "replica of " if body.replica else ""
    room = f"{what}{body.blocks} blocks for {len(body.token_ids)} tokens in epoch {body.epoch}"
    award = f", award of {ask_name(body.award)}" if body.award else ""
    pull = f", round 1: read {_span(0, len(body.pull))}" if body.pull else ""
    return f"{_name(body.migration)} {room}{award}{pull}"


def _prepared(body: MigrationPrepared) -> str:
    read = f", {_size(body.bytes)} in {body.descriptors} pieces, {duration(body.duration_ns)}" if body.blocks else ""
    return f"{_name(body.migration)} matched={body.matched_blocks} read={body.blocks} by {body.copier}{read}"


def _pull(body: PullKv) -> str:
    proven = f" proven={body.proven}" if body.proven else ""
    blocks = _span(body.from_block, len(body.blocks))
    return f"{_name(body.migration)} round {body.round}: read {blocks} within {body.read_ms}ms{proven}"


def _pulled(body: KvPulled) -> str:
    pieces = f"{_size(body.bytes)} in {body.descriptors} pieces by {body.copier}"
    return f"{_name(body.migration)} blocks={body.blocks} {pieces}, {duration(body.duration_ns)}"


def _freeze(body: FreezeSequence) -> str:
    unless = "" if body.new_blocks_max is None else f", unless more than {body.new_blocks_max} are full"
    return f"{_name(body.migration)} from block {body.from_block} for {body.freeze_ms}ms{unless}"


def _frozen(body: SequenceFrozen) -> str:
    blocks = _span(body.from_block, len(body.blocks))
    return f"{_name(body.migration)} blocks={blocks} output={len(body.output_token_ids)}"


def _moved(body: SequenceMoved) -> str:
    return f"{_name(body.migration)} to {body.instance} epoch={body.epoch} with {body.first_index} tokens"


def _end(body: EndLease) -> str:
    return f"{_name(body.migration)} {'it moved' if body.moved else 'go on'}"


def _bare(body: UnreserveKv) -> str:
    return _name(body.migration)


def _refused(body: KvRefused) -> str:
    return f"{_name(body.migration)} {body.reason} {body.detail}".rstrip()


def _finished(body: MigrationFinished) -> str:
    cost = body.cost
    rounds = f"{_size(cost.bytes)} in {cost.rounds} rounds, {cost.descriptors} pieces" if cost.bytes else ""
    fields = shown_fields(
        {
            "refusal": body.refusal,
            "detail": body.detail,
            "tokens": cost.tokens or None,
            "matched": cost.matched_blocks or None,
            "by": cost.copier,
            "gap_ns": cost.frozen_ns or None,
            "took_ns": cost.duration_ns,
        }
    )
    way = f"{body.source} → {body.target or '?'}"
    copied = f" copied {rounds}" if rounds else ""
    return f"{_name(body.migration)} {way} {body.outcome} epoch={body.epoch} {body.reason}{copied} {fields}"


def _entry(kind: type[B], function: Callable[[B], str]) -> tuple[type[Body], Callable[[Body], str]]:
    return kind, cast("Callable[[Body], str]", function)


def _replicated(body: KvReplicated) -> str:
    return f"{_name(body.replica)} at {body.instance}: {body.tokens} tokens of epoch {body.epoch}"


MIGRATION_SUMMARIES: Mapping[type[Body], Callable[[Body], str]] = dict(
    [
        _entry(MigrateSequence, _migrate),
        _entry(MoveSequence, _move),
        _entry(EvacuateInstance, _evacuate),
        _entry(InstanceEvacuated, _evacuated),
        _entry(LeaseKv, _lease),
        _entry(KvLeased, _leased),
        _entry(AllotEpoch, _allot),
        _entry(EpochAllotted, _allotted),
        _entry(EpochRefused, _no_epoch),
        _entry(PrepareMigration, _prepare),
        _entry(MigrationPrepared, _prepared),
        _entry(PullKv, _pull),
        _entry(KvPulled, _pulled),
        _entry(FreezeSequence, _freeze),
        _entry(SequenceFrozen, _frozen),
        _entry(SequenceMoved, _moved),
        _entry(KvReplicated, _replicated),
        _entry(EndLease, _end),
        _entry(UnreserveKv, _bare),
        _entry(KvRefused, _refused),
        _entry(MigrationFinished, _finished),
    ]
)
