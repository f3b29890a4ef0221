"""Summaries of message bodies: one short text for each message type, with the fields that matter. Pure.

Types without an entry here are shown field by field; long lists and texts are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from millrace.cli.field_text import ITEMS_MAX, bounded_list, duration, shown_fields
from millrace.contracts.broker import LoadReported, LoadsReported
from millrace.contracts.ingress import TokenChunk, TokensGenerated
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrationFinished
from millrace.contracts.observers import DecisionMade
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.status import InstanceSummary, StatusSnapshot
from millrace.contracts.worker import SubmitSequence

#: Fields that a line shows before the text, or that say nothing to a person.
_BESIDE = ("request", "sequence", "incarnation", "endpoint", "token_ids", "checksums", "submission", "block_hashes")


def summary(body: Body) -> str:
    """The text for a body of any known type."""
    if special := _SUMMARIES.get(type(body)):
        return special(body)
    fields = msgspec.structs.asdict(body)
    return shown_fields({key: value for key, value in fields.items() if key not in _BESIDE})


def _submit(body: SubmitSequence) -> str:
    sampling = body.sampling
    return shown_fields(
        {
            "epoch": str(body.epoch),
            "prompt": len(body.prompt_token_ids),
            "output_so_far": len(body.output_token_ids) or None,
            "max": sampling.max_tokens,
            "expected": body.expected_output_tokens,
            "handover": body.handover.migration[:6] if body.handover is not None else None,
            "temperature": None if sampling.temperature == 1.0 else str(sampling.temperature),
            "seed": sampling.seed,
            "structured": sampling.structured is not None,
            "to": body.ingress,
        }
    )


def _chunk(chunk: TokenChunk) -> str:
    end = f"!{chunk.finish.value}" if chunk.finish else ""
    epoch = f"e{chunk.epoch}" if chunk.epoch else ""
    return f"{chunk.sequence}{epoch}@{chunk.first_index}+{len(chunk.token_ids)}{end}"


def _tokens(body: TokensGenerated) -> str:
    tokens = sum(len(chunk.token_ids) for chunk in body.chunks)
    return f"step={body.step} tokens={tokens} {bounded_list([_chunk(chunk) for chunk in body.chunks])}"


def _blocks(free: int, total: int) -> str:
    return f"{total - free}/{total}"


def _status(body: StatusSnapshot) -> str:
    batch = body.batch
    return (
        f"step={body.step} took={duration(body.step_duration_ns)} running={len(body.running)} "
        f"waiting={len(body.waiting)} blocks={_blocks(body.blocks_free, body.blocks_total)} "
        f"batch={batch.decodes}d+{batch.prefill_tokens}p preemptions={body.preemptions}"
    )


def _summary(body: InstanceSummary) -> str:
    return (
        f"running={body.running} waiting={body.waiting} blocks={_blocks(body.blocks_free, body.blocks_total)} "
        f"output={body.output_tokens_total}{' draining' * body.draining} to_prefill={body.waiting_prefill_tokens} "
        f"preemptions={body.preemptions}"
    )


def _decision(body: DecisionMade) -> str:
    scores = bounded_list([f"{s.name}:{s.note or format(s.score, '.4g')}" for s in body.scores])
    epoch = f" epoch={body.epoch}" if body.epoch else ""
    instead = f" fallback={body.fallback}" if body.fallback else ""
    told = bounded_list([f"{f.name}:{f.note or duration(f.e2e_ns)}" for f in body.forecasts])
    futures = f" predicted={told}" if body.forecasts else ""
    return f"{body.kind} to {body.chosen or 'nobody'}{epoch} by {body.policy}{instead} {scores}{futures} {body.reason}"


def _with_role(stage: Stage, instance: str) -> str:
    role = stage.roles.get(instance)
    return f"{instance}:{role}" if role is not None else instance


def _plan(body: Plan) -> str:
    stages = [
        f"{stage.name}[{stage.length_min},{'∞' if stage.length_max is None else stage.length_max})"
        f"={','.join(_with_role(stage, name) for name in stage.instances[:ITEMS_MAX])}"
        f"{'…' * (len(stage.instances) > ITEMS_MAX)}"
        for stage in body.stages
    ]
    return f"epoch={body.epoch} by={body.coordinator} {bounded_list(stages)}"


def _loads(body: LoadsReported) -> str:
    return "; ".join(map(load_summary, body.loads))


def load_summary(body: LoadReported) -> str:
    """Load of an instance, and its broker's sentence on it."""
    coming = f" queued={body.queued_tokens}" if body.queued_tokens else ""
    peak = f" peak={max(body.curve.blocks)}" if body.curve is not None and body.curve.blocks else ""
    why = f" | {body.why}" if body.why else ""
    return (
        f"{body.instance} stage={body.stage or '-'} tokens={body.tokens} waiting={body.waiting_tokens} "
        f"running={body.running} blocks={_blocks(body.blocks_free, body.blocks_total)}{peak}{coming}{why}"
    )


def _migrated(body: MigrationFinished) -> str:
    way = f"{body.source} → {body.target or '?'} {body.outcome} {body.reason}"
    cost = {name: value for name, value in msgspec.structs.asdict(body.cost).items() if value}
    fields = {"refusal": body.refusal, "detail": body.detail, "migration": body.migration, "epoch": body.epoch} | cost
    return f"{way} {shown_fields(fields)}"


_SUMMARIES: dict[type[Body], Callable[[Any], str]] = {
    SubmitSequence: _submit,
    TokensGenerated: _tokens,
    StatusSnapshot: _status,
    InstanceSummary: _summary,
    DecisionMade: _decision,
    Plan: _plan,
    LoadsReported: _loads,
    MigrationFinished: _migrated,
}
