"""Spans of one sequence at a worker: queue, prefill and decode, made once when it ends."""

from __future__ import annotations

import random
from typing import Any

from millrace.actor.effects import RecordSpan

from services.worker.state import Held

#: ``00-<32 hex>-<16 hex>-<2 hex>``
TRACEPARENT_LENGTH = 55
_SAMPLED = 1
#: Outcome of a sequence that decodes on elsewhere.
MOVED = "moved"


def sampled(traceparent: str) -> bool:
    """Whether a trace context is well formed and asks for recording."""
    if len(traceparent) != TRACEPARENT_LENGTH or traceparent[2] != "-" or traceparent[-3] != "-":
        return False
    try:
        return bool(int(traceparent[-2:], 16) & _SAMPLED)
    except ValueError:
        return False


def sequence_spans(
    held: Held, *, instance: str, end_ns: int, outcome: str, rng: random.Random, bound: int = 0
) -> list[RecordSpan]:
    """The spans of a sequence that ends now; none where its trace is not sampled.

    A sequence that ended early has only the spans of the phases it reached; the last of them carries the outcome as
    its error unless the sequence was decoded to its end, or moved.

    Args: bound: tokens of a step at most, where steps were bounded while it was here; 0 where they were not.
    """
    if not sampled(held.traceparent):
        return []
    scheduled_ns = held.scheduled_ns or held.first_token_ns
    phases = [("queue", held.received_ns, scheduled_ns or end_ns)]
    if scheduled_ns:
        phases.append(("prefill", scheduled_ns, held.first_token_ns or end_ns))
    if held.first_token_ns:
        phases.append(("decode", held.first_token_ns, end_ns))
    attributes = _attributes(held, instance=instance, outcome=outcome)
    if bound:
        attributes["millrace.step_tokens_max"] = bound
    trace_id, parent, flags = held.traceparent[3:35], held.traceparent[36:52], held.traceparent[53:]
    return [
        RecordSpan(
            name=name,
            traceparent=f"00-{trace_id}-{rng.getrandbits(64) or 1:016x}-{flags}",
            parent_span_id=parent,
            start_ns=start,
            end_ns=max(start, end),
            attributes=attributes,
            error="" if index < len(phases) - 1 or held.finish in ("stop", "length") or outcome == MOVED else outcome,
        )
        for index, (name, start, end) in enumerate(phases)
    ]


def _attributes(held: Held, *, instance: str, outcome: str) -> dict[str, Any]:
    return {
        "millrace.sequence": held.sequence,
        "millrace.instance": instance,
        "millrace.epoch": held.epoch,
        "millrace.prompt_tokens": held.prompt_tokens,
        "millrace.cached_tokens": held.cached_tokens or 0,
        "millrace.recomputed_tokens": held.base_index,
        "millrace.output_tokens": len(held.token_ids) - held.brought,
        "millrace.brought_tokens": held.brought,
        "millrace.preemptions": held.preemptions,
        "millrace.outcome": outcome,
    }
