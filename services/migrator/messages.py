"""Messages of the driving side at each step, built from the state of one migration. Pure."""

from __future__ import annotations

import msgspec
from millrace.actor.effects import Log
from millrace.contracts.kv import KvHandover
from millrace.contracts.leases import EndLease, FreezeSequence, LeaseKv, PrepareMigration, PullKv
from millrace.contracts.migration import (
    AllotEpoch,
    MigrationFinished,
    MigrationMode,
    MigrationOutcome,
)
from millrace.contracts.worker import SubmitSequence
from millrace.kvcache.chain import extend_chain, pack_hashes

from services.migrator.config import MigratorLimits
from services.migrator.state import OutgoingMigration

#: A round that brought no more full blocks than this is not worth another one: the next would bring as many.
NEW_BLOCKS_MAX = 1


def lease_of(out: OutgoingMigration, limits: MigratorLimits) -> LeaseKv:
    """Pins, and tells what is full from the first block on that the target does not have."""
    return LeaseKv(
        migration=out.migration,
        sequence=out.sequence,
        epoch=out.epoch,
        from_block=out.from_block,
        lease_ms=limits.lease_ms,
    )


def allot_of(out: OutgoingMigration, incarnation: int) -> AllotEpoch:
    """Asks ingress; ``incarnation`` is the target's."""
    return AllotEpoch(
        migration=out.migration,
        sequence=out.sequence,
        epoch=out.epoch,
        source=out.source,
        target=out.target,
        incarnation=incarnation,
    )


def blocks_of(out: OutgoingMigration, limits: MigratorLimits) -> int:
    """To reserve: for the whole sequence as it is now, and some to grow."""
    assert out.submission is not None
    assert out.endpoint is not None
    tokens = len(out.submission.prompt_token_ids) + len(out.submission.output_token_ids)
    return -(-tokens // out.endpoint.block_tokens) + limits.growth_blocks


def prepare_of(out: OutgoingMigration, limits: MigratorLimits, *, read_ms: int) -> PrepareMigration:
    """Room for the whole sequence, and the first blocks of the first round."""
    assert out.submission is not None
    assert out.endpoint is not None
    assert out.leased is not None
    count = 0
    if out.mode is MigrationMode.LIVE and limits.rounds_max > 0 and len(out.leased.blocks) > NEW_BLOCKS_MAX:
        count = max(1, min(limits.pull_bytes_first, limits.pull_bytes_max) // max(1, out.endpoint.block_bytes))
    return PrepareMigration(
        migration=out.migration,
        sequence=out.sequence,
        epoch=out.target_epoch,
        endpoint=out.endpoint,
        token_ids=[*out.submission.prompt_token_ids, *out.submission.output_token_ids],
        blocks=blocks_of(out, limits),
        reserve_ms=limits.reserve_ms,
        pull=out.leased.blocks[:count],
        checksums=[rank[:count] for rank in out.leased.checksums],
        read_ms=read_ms,
    )


def note_clock(out: OutgoingMigration, at_ns: int, now_ns: int) -> None:
    """The clock of the target's worker showed ``at_ns`` when it answered, and that answer came now. It took some
    time, so that clock is ahead of ours by the difference at least. The answer that took least says most.
    """
    if at_ns:
        least_ns = at_ns - now_ns
        out.ahead_ns = least_ns if out.ahead_ns is None else max(out.ahead_ns, least_ns)


def until_of(out: OutgoingMigration, deadline_ns: int) -> int:
    """A deadline of ours by the clock of the target's worker: never too late, however its clock is set and however
    long messages take. 0 where it did not say what its clock shows.
    """
    return 0 if out.ahead_ns is None else deadline_ns + out.ahead_ns


def pull_of(out: OutgoingMigration, limits: MigratorLimits, *, read_ms: int) -> PullKv:
    """The present round, or as much of it as one pull may copy."""
    assert out.leased is not None
    assert out.endpoint is not None
    first = out.from_block - out.leased.from_block
    bytes_max = min(out.pull_bytes or limits.pull_bytes_first, limits.pull_bytes_max)
    last = first + max(1, bytes_max // max(1, out.endpoint.block_bytes))
    last = min(last, out.round_to - out.leased.from_block)
    return PullKv(
        migration=out.migration,
        from_block=out.from_block,
        blocks=out.leased.blocks[first:last],
        read_ms=read_ms,
        checksums=[rank[first:last] for rank in out.leased.checksums],
        round=out.rounds,
    )


def freeze_ms_of(out: OutgoingMigration, limits: MigratorLimits) -> int:
    """Longest freeze of the source, ms; at most its worker's limit, as the worker would resume unnoticed after that."""
    assert out.endpoint is not None
    bound = out.endpoint.freeze_ms_max or limits.copy_freeze_ms
    wanted = limits.copy_freeze_ms
    if out.mode is MigrationMode.LIVE:
        wanted = min(wanted, limits.freeze_ms + 2 * (out.slow_ns // 1_000_000))
    return min(wanted, bound)


def freeze_of(out: OutgoingMigration, limits: MigratorLimits) -> FreezeSequence:
    """Stops the source, unless another round pays."""
    last = out.mode is not MigrationMode.LIVE or out.rounds >= limits.rounds_max
    # What has outgrown the reservation travels with the tail, for which the target takes what room it has then.
    last = last or out.from_block >= out.reserved_blocks
    return FreezeSequence(
        migration=out.migration,
        sequence=out.sequence,
        epoch=out.epoch,
        from_block=out.from_block,
        freeze_ms=freeze_ms_of(out, limits),
        new_blocks_max=None if last else NEW_BLOCKS_MAX,
        lease_ms=limits.lease_ms,
    )


def commit_of(out: OutgoingMigration, *, read_ms: int, until_ns: int) -> SubmitSequence:
    """The sequence as the target's worker gets it: with every token, and where the rest of its KV is."""
    assert out.submission is not None
    assert out.endpoint is not None
    assert out.frozen is not None
    frozen, handover = out.frozen, None
    if out.mode is not MigrationMode.RECOMPUTE:
        handover = KvHandover(
            migration=out.migration,
            endpoint=out.endpoint,
            from_block=frozen.from_block,
            blocks=frozen.blocks,
            computed_tokens=frozen.computed_tokens,
            read_ms=read_ms,
            checksums=frozen.checksums,
            until_ns=until_ns,
        )
    return msgspec.structs.replace(
        out.submission,
        epoch=out.target_epoch,
        output_token_ids=frozen.output_token_ids,
        output_logprobs=frozen.logprobs,
        handover=handover,
        migration=out.migration if handover is None else "",
    )


def end_of(out: OutgoingMigration) -> EndLease:
    """Lets the source's sequence go, or go on."""
    moved = out.outcome is MigrationOutcome.MOVED
    return EndLease(migration=out.migration, sequence=out.sequence, epoch=out.epoch, moved=moved)


def finished(out: OutgoingMigration, model: str, now_ns: int) -> MigrationFinished:
    """Message that is published when the migration has ended."""
    assert out.outcome is not None
    block_size, block_hashes = _taken_along(out)
    return MigrationFinished(
        migration=out.migration,
        sequence=out.sequence,
        model=model,
        source=out.source,
        target=out.target or out.wanted,
        outcome=out.outcome,
        reason=out.reason,
        epoch=out.target_epoch if out.target_epoch >= 0 else out.epoch,
        refusal=out.refusal,
        detail=out.detail,
        copier=out.copier,
        rounds=out.rounds,
        matched_blocks=out.matched_blocks,
        bytes=out.bytes,
        descriptors=out.descriptors,
        tokens=out.tokens,
        frozen_ns=out.frozen_ns,
        duration_ns=now_ns - (out.started_ns or now_ns),
        mode=out.mode,
        block_size=block_size,
        block_hashes=block_hashes,
        orders=list(out.orders),
        note=out.note,
    )


def _taken_along(out: OutgoingMigration) -> tuple[int, bytes]:
    """Size, tokens, and packed hashes of the blocks that the target has now, too; 0 and none where it did not move."""
    if out.outcome is not MigrationOutcome.MOVED or not (out.submission and out.frozen and out.endpoint):
        return 0, b""
    tokens = [*out.submission.prompt_token_ids, *out.frozen.output_token_ids][: out.frozen.computed_tokens]
    hashes: list[int] = []
    extend_chain(hashes, tokens, out.endpoint.block_tokens)
    return out.endpoint.block_tokens, pack_hashes(hashes)


def prompt_hashes(out: OutgoingMigration) -> list[int]:
    """Chain hashes of the prompt's full blocks; none before the lease."""
    hashes: list[int] = []
    if out.submission is not None and out.endpoint is not None:
        extend_chain(hashes, out.submission.prompt_token_ids, out.endpoint.block_tokens)
    return hashes


def rest_of(out: OutgoingMigration) -> int | None:
    """Predicted tokens still to come; None where nothing was predicted, or it was outrun."""
    submission = out.submission
    if submission is None or submission.expected_output_tokens is None:
        return None
    rest = submission.expected_output_tokens - len(submission.output_token_ids)
    return rest if rest > 0 else None


def finished_line(body: MigrationFinished) -> Log:
    """The same for the log."""
    fields = {
        "migration": body.migration,
        "sequence": body.sequence,
        "target": body.target,
        "outcome": str(body.outcome),
        "refusal": str(body.refusal or ""),
        "detail": body.detail,
        "frozen_ms": body.frozen_ns / 1e6,
        "rounds": body.rounds,
    }
    return Log(level="info", event="migration_finished", fields=fields)
