"""What matters in each message type, in one short text. Pure.

Types without an entry here are shown field by field; long lists and texts are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from millrace.contracts.ingress import SequencesReturned, TokenChunk, TokensGenerated, TokensResent
from millrace.contracts.message import Body
from millrace.contracts.observers import DecisionMade, ProvisioningDecided, RequestFinished
from millrace.contracts.plan import Plan
from millrace.contracts.status import InstanceRecord, InstanceSummary, ServicePresence, StatusSnapshot
from millrace.contracts.worker import SubmitSequence

B = TypeVar("B", bound=Body)

#: Items of a list that are shown before the count of the rest.
ITEMS_MAX = 4

#: Characters of a text that are shown.
TEXT_MAX = 60


def summary(body: Body) -> str:
    """The text for a body of any known type."""
    if special := _SUMMARIES.get(type(body)):
        return special(body)
    fields = msgspec.structs.asdict(body)
    return shown_fields({key: value for key, value in fields.items() if key not in ("request", "sequence")})


def shown_fields(fields: Mapping[str, Any], *, text_max: int = TEXT_MAX) -> str:
    """``key=value`` pairs; what is None, empty or False is left out, texts are cut at ``text_max`` characters."""
    shown = [(key, value) for key, value in fields.items() if value not in (None, "", [], {}) and value is not False]
    return " ".join(f"{key.removesuffix('_ns')}={_shown(key, value, text_max)}" for key, value in shown)


def _shown(key: str, value: Any, text_max: int = TEXT_MAX) -> str:
    if key.endswith("_ns") and isinstance(value, int):
        return duration(value) if value < _YEAR_NS else f"…{value % 10**12 / 1e9:.3f}s"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        text = value if len(value) <= text_max else value[: text_max - 1] + "…"
        return repr(text) if " " in text else text
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, list | tuple):
        return bounded_list([_shown("", item) for item in value])
    if isinstance(value, dict):
        return "{" + shown_fields({str(name): item for name, item in list(value.items())[:ITEMS_MAX]}) + "}"
    if isinstance(value, msgspec.Struct):
        return "{" + shown_fields(msgspec.structs.asdict(value)) + "}"
    return str(value)


_YEAR_NS = 365 * 86_400 * 10**9


def duration(ns: int) -> str:
    """A time span with three significant digits and its unit."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if abs(ns) >= size:
            return f"{ns / size:.4g}{unit}" if ns / size >= 100 else f"{ns / size:.3g}{unit}"
    return f"{ns}ns" if ns else "0"


def bounded_list(items: list[str]) -> str:
    """``[a b c d +12]``."""
    rest = f" +{len(items) - ITEMS_MAX}" if len(items) > ITEMS_MAX else ""
    return f"[{' '.join(items[:ITEMS_MAX])}{rest}]"


def _submit(body: SubmitSequence) -> str:
    sampling = body.sampling
    return shown_fields(
        {
            "epoch": str(body.epoch),
            "prompt": len(body.prompt_token_ids),
            "output_so_far": len(body.output_token_ids) or None,
            "max": sampling.max_tokens,
            "expected": body.expected_output_tokens,
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


def _resent(body: TokensResent) -> str:
    return _chunk(body.chunk)


def _returned(body: SequencesReturned) -> str:
    sequences = bounded_list([f"{sequence}e{epoch}" for sequence, epoch in body.sequences])
    return f"{body.instance} reason={body.reason.value} {sequences}"


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


def _finished(body: RequestFinished) -> str:
    return f"{body.outcome} " + shown_fields(
        {
            "prompt": body.prompt_tokens,
            "cached": body.cached_tokens or None,
            "output": body.output_tokens,
            "finish": body.finish_reasons,
            "ttft_ns": body.ttft_ns,
            "e2e_ns": body.e2e_ns,
            "predicted_e2e_ns": body.predicted_e2e_ns,
            "continuations": body.continuations or None,
            "migrations": body.migrations or None,
            "instances": body.instances,
            "detail": body.detail,
        }
    )


def _provisioning(body: ProvisioningDecided) -> str:
    whom = f" {bounded_list(body.instances)}" if body.instances else ""
    return (
        f"{body.action} {body.count}{whom} by {body.strategy}: {body.reason}; serving={body.serving} "
        f"starting={body.starting} stopping={body.stopping} utilisation={body.utilisation:.2g}"
    )


def _presence(body: ServicePresence) -> str:
    return f"{body.role} {body.name} {body.state.value} {body.url}".rstrip()


def _record(body: InstanceRecord) -> str:
    return (
        f"{body.engine} {body.engine_version} {body.model} max_len={body.max_model_len} "
        f"sequences={body.max_sequences} budget={body.token_budget} blocks={body.blocks_total}x{body.block_size}"
    )


def _plan(body: Plan) -> str:
    stages = [
        f"{stage.name}[{stage.length_min},{'∞' if stage.length_max is None else stage.length_max})"
        f"={','.join(stage.instances[:ITEMS_MAX])}{'…' * (len(stage.instances) > ITEMS_MAX)}"
        for stage in body.stages
    ]
    return f"epoch={body.epoch} by={body.coordinator} {bounded_list(stages)}"


def _entry(kind: type[B], function: Callable[[B], str]) -> tuple[type[Body], Callable[[Body], str]]:
    return kind, cast("Callable[[Body], str]", function)


_SUMMARIES: dict[type[Body], Callable[[Body], str]] = dict(
    [
        _entry(SubmitSequence, _submit),
        _entry(TokensGenerated, _tokens),
        _entry(TokensResent, _resent),
        _entry(SequencesReturned, _returned),
        _entry(StatusSnapshot, _status),
        _entry(InstanceSummary, _summary),
        _entry(DecisionMade, _decision),
        _entry(RequestFinished, _finished),
        _entry(ProvisioningDecided, _provisioning),
        _entry(ServicePresence, _presence),
        _entry(InstanceRecord, _record),
        _entry(Plan, _plan),
    ]
)
