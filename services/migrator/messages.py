"""Messages of each step of a migration, and the record of its end, built from its state. Pure.

The span of a migration is a child of the span that placed the sequence; its context travels with each of its messages.
What the target's worker does with the sequence afterwards is below a span of ingress, whose context came with the
epoch. So the request's trace stays one tree.
"""

from __future__ import annotations

from random import Random

import msgspec
from millrace.actor.effects import Effect, Log, RecordSpan
from millrace.contracts.kv import KvHandover
from millrace.contracts.leases import EndLease, FreezeSequence, LeaseKv, PrepareMigration, PullKv
from millrace.contracts.migration import (
    AllotEpoch,
    MigrationCost,
    MigrationFinished,
    MigrationMode,
    MigrationOutcome,
)
from millrace.contracts.worker import SubmitSequence
from millrace.kvcache.chain import extend_chain, pack_hashes, salted_root
from millrace.telemetry.tracecontext import child, format_traceparent, parse_traceparent

from services.migrator.config import MigratorLimits
from services.migrator.state import OutgoingMigration

#: A round that brought no more full blocks than this is not worth another one: the next would bring as many.
#: Source: Llumnix, section 4.2, and CascadeInfer, section 5; differs in that a round counts blocks, since only full
#: ones travel while the source decodes.
NEW_BLOCKS_MAX = 1


def lease_of(out: OutgoingMigration, limits: MigratorLimits) -> LeaseKv:
    """Pins, and tells what is full from the first block on that the target does not have."""
    return LeaseKv(
        migration=out.migration,
        sequence=out.sequence,
        epoch=out.lease.epoch,
        from_block=out.copy.from_block,
        lease_ms=limits.lease_ms,
    )


def allot_of(out: OutgoingMigration, incarnation: int) -> AllotEpoch:
    """Asks ingress; ``incarnation`` is the target's."""
    return AllotEpoch(
        migration=out.migration,
        sequence=out.sequence,
        epoch=out.lease.epoch,
        source=out.source,
        target=out.target,
        incarnation=incarnation,
    )


def _blocks(out: OutgoingMigration, limits: MigratorLimits) -> int:
    """To reserve: for the whole sequence as it is now, and some to grow."""
    assert out.lease.submission is not None
    assert out.lease.endpoint is not None
    tokens = len(out.lease.submission.prompt_token_ids) + len(out.lease.submission.output_token_ids)
    return -(-tokens // out.lease.endpoint.block_tokens) + limits.growth_blocks


def prepare_of(out: OutgoingMigration, limits: MigratorLimits, *, read_ms: int) -> PrepareMigration:
    """Room for the whole sequence, and the first blocks of the first round."""
    lease = out.lease
    assert lease.submission is not None
    assert lease.endpoint is not None
    assert lease.answer is not None
    count = 0
    if out.mode is MigrationMode.LIVE and limits.rounds_max > 0 and len(lease.answer.blocks) > NEW_BLOCKS_MAX:
        count = max(1, min(limits.pull_bytes_first, limits.pull_bytes_max) // max(1, lease.endpoint.block_bytes))
    return PrepareMigration(
        migration=out.migration,
        sequence=out.sequence,
        epoch=out.room.epoch,
        endpoint=lease.endpoint,
        token_ids=told_tokens(lease.submission),
        blocks=_blocks(out, limits),
        reserve_ms=limits.reserve_ms,
        pull=lease.answer.blocks[:count],
        checksums=[rank[:count] for rank in lease.answer.checksums],
        read_ms=read_ms,
        award=out.order.award,
        adapter=lease.submission.sampling.adapter,
    )


def told_tokens(submission: SubmitSequence) -> list[int]:
    """A sequence's tokens, for the target's prefix cache. With a salt or images its blocks have other names there: then
    only the first, which fills no block.
    """
    sampling, tokens = submission.sampling, [*submission.prompt_token_ids, *submission.output_token_ids]
    return tokens[:1] if sampling.cache_salt or sampling.images is not None else tokens


def note_clock(out: OutgoingMigration, at_ns: int, now_ns: int) -> None:
    """The clock of the target's worker showed ``at_ns`` when it answered, and that answer came now. It took some
    time, so that clock is ahead of ours by the difference at least. The answer that took least says most.
    """
    if at_ns:
        least_ns = at_ns - now_ns
        out.room.ahead_ns = least_ns if out.room.ahead_ns is None else max(out.room.ahead_ns, least_ns)


def _by_targets_clock(out: OutgoingMigration, deadline_ns: int) -> int:
    """A deadline of ours by the clock of the target's worker: never too late, however its clock is set and however
    long messages take. 0 where it did not say what its clock shows.
    """
    return 0 if out.room.ahead_ns is None else deadline_ns + out.room.ahead_ns


def pull_of(out: OutgoingMigration, limits: MigratorLimits, *, read_ms: int) -> PullKv:
    """The present round, or as much of it as one pull may copy."""
    leased, copy, endpoint = out.lease.answer, out.copy, out.lease.endpoint
    assert leased is not None
    assert endpoint is not None
    first = copy.from_block - leased.from_block
    bytes_max = min(copy.pull_bytes or limits.pull_bytes_first, limits.pull_bytes_max)
    last = first + max(1, bytes_max // max(1, endpoint.block_bytes))
    last = min(last, copy.round_to - leased.from_block)
    return PullKv(
        migration=out.migration,
        from_block=copy.from_block,
        blocks=leased.blocks[first:last],
        read_ms=read_ms,
        checksums=[rank[first:last] for rank in leased.checksums],
        round=copy.round,
    )


def freeze_ms_of(out: OutgoingMigration, limits: MigratorLimits) -> int:
    """Longest freeze of the source, ms; at most its worker's limit, as the worker would resume unnoticed after that."""
    endpoint = out.lease.endpoint  # none where only KV cannot move
    bound = (endpoint.freeze_ms_max if endpoint is not None else 0) or limits.copy_freeze_ms
    wanted = limits.copy_freeze_ms
    if out.mode is MigrationMode.LIVE:
        wanted = min(wanted, limits.freeze_ms + 2 * (out.lease.slow_ns // 1_000_000))
    return min(wanted, bound)


def freeze_of(out: OutgoingMigration, limits: MigratorLimits) -> FreezeSequence:
    """Stops the source, unless another round pays."""
    last = out.mode is not MigrationMode.LIVE or out.copy.round >= limits.rounds_max
    # What has outgrown the reservation travels with the tail, for which the target takes what room it has then.
    last = last or out.copy.from_block >= out.room.blocks
    return FreezeSequence(
        migration=out.migration,
        sequence=out.sequence,
        epoch=out.lease.epoch,
        from_block=out.copy.from_block,
        freeze_ms=freeze_ms_of(out, limits),
        new_blocks_max=None if last else NEW_BLOCKS_MAX,
        lease_ms=limits.lease_ms,
    )


def commit_of(out: OutgoingMigration, *, read_ms: int, until_ns: int) -> SubmitSequence:
    """The sequence as the target's worker gets it: with every token, and where the rest of its KV is.

    Args:
        read_ms: The source stands still for so long.
        until_ns: And until this time, by our clock.
    """
    assert out.lease.submission is not None
    assert out.freeze.frozen is not None
    frozen, handover = out.freeze.frozen, None
    if out.mode is not MigrationMode.RECOMPUTE:
        assert out.lease.endpoint is not None
        handover = KvHandover(
            migration=out.migration,
            endpoint=out.lease.endpoint,
            from_block=frozen.from_block,
            blocks=frozen.blocks,
            computed_tokens=frozen.computed_tokens,
            read_ms=read_ms,
            checksums=frozen.checksums,
            until_ns=_by_targets_clock(out, until_ns),
        )
    return msgspec.structs.replace(
        out.lease.submission,
        epoch=out.room.epoch,
        output_token_ids=frozen.output_token_ids,
        output_logprobs=frozen.logprobs,
        handover=handover,
        migration=out.migration if handover is None else "",
    )


def end_of(out: OutgoingMigration) -> EndLease:
    """Lets the source's sequence go, or go on."""
    moved = out.outcome is MigrationOutcome.MOVED
    return EndLease(migration=out.migration, sequence=out.sequence, epoch=out.lease.epoch, moved=moved)


def finished(out: OutgoingMigration, model: str, now_ns: int) -> MigrationFinished:
    """Message that is published when the migration has ended."""
    assert out.outcome is not None
    block_size, block_hashes = _taken_along(out)
    copy = out.copy
    return MigrationFinished(
        migration=out.migration,
        sequence=out.sequence,
        model=model,
        source=out.source,
        target=out.target,
        outcome=out.outcome,
        reason=out.order.reason,
        epoch=out.room.epoch if out.room.epoch >= 0 else out.lease.epoch,
        refusal=out.refusal,
        detail=out.detail,
        award=out.order.award,
        mode=out.mode,
        cost=MigrationCost(
            copier=copy.copier,
            rounds=copy.round,
            matched_blocks=copy.matched_blocks,
            bytes=copy.bytes,
            descriptors=copy.descriptors,
            copied_ns=copy.copied_ns,
            tokens=out.tokens,
            frozen_ns=out.frozen_ns,
            duration_ns=now_ns - out.started_ns,
        ),
        block_size=block_size,
        block_hashes=block_hashes,
        note=out.order.note,
    )


def _taken_along(out: OutgoingMigration) -> tuple[int, bytes]:
    """Size, tokens, and packed hashes of the blocks that the target has now, too; 0 and none where it did not move."""
    lease, frozen = out.lease, out.freeze.frozen
    if (
        out.outcome is not MigrationOutcome.MOVED
        or lease.submission is None
        or frozen is None
        or lease.endpoint is None
    ):
        return 0, b""
    tokens = [*lease.submission.prompt_token_ids, *frozen.output_token_ids][: frozen.computed_tokens]
    hashes: list[int] = []
    root = salted_root(lease.submission.sampling.prefix_salt)
    extend_chain(hashes, tokens, lease.endpoint.block_tokens, root)
    return lease.endpoint.block_tokens, pack_hashes(hashes)


def finished_line(body: MigrationFinished) -> Log:
    """The same for the log."""
    fields = {
        "migration": body.migration,
        "sequence": body.sequence,
        "target": body.target,
        "reason": str(body.reason),
        "outcome": str(body.outcome),
        "refusal": str(body.refusal or ""),
        "detail": body.detail,
        "frozen_ms": body.cost.frozen_ns / 1e6,
        "rounds": body.cost.rounds,
    }
    return Log(level="info", event="migration_finished", fields=fields)


def below(traceparent: str, rng: Random) -> str:
    """Context of a new span below another one; the same again where nothing is sampled."""
    parent = parse_traceparent(traceparent)
    if parent is None or not parent.sampled:
        return traceparent
    return format_traceparent(child(parent, rng))


def span_of(out: OutgoingMigration, end_ns: int) -> list[Effect]:
    """The span of the whole migration, with its rounds as events; none where the request is not sampled."""
    own, parent = parse_traceparent(out.span), parse_traceparent(out.traceparent)
    if own is None or parent is None or not own.sampled:
        return []
    error = "" if out.refusal is None else f"{out.outcome}: {out.refusal} {out.detail}".strip()
    attributes = {
        "millrace.migration": out.migration,
        "millrace.sequence": out.sequence,
        "millrace.source": out.source,
        "millrace.target": out.target,
        "millrace.reason": str(out.order.reason),
        "millrace.note": out.order.note,
        "millrace.mode": str(out.mode),
        "millrace.outcome": str(out.outcome),
        "millrace.epoch": out.room.epoch,
        "millrace.rounds": out.copy.round,
        "millrace.matched_blocks": out.copy.matched_blocks,
        "millrace.bytes": out.copy.bytes,
        "millrace.descriptors": out.copy.descriptors,
        "millrace.copier": out.copy.copier,
        "millrace.tokens": out.tokens,
        "millrace.frozen_ms": out.frozen_ns / 1e6,
    }
    return [
        RecordSpan(
            name="migration",
            traceparent=out.span,
            parent_span_id=parent.span_id,
            start_ns=out.started_ns,
            end_ns=max(out.started_ns, end_ns),
            attributes=attributes,
            events=list(out.events),
            error=error,
        )
    ]
