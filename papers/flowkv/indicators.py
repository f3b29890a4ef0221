"""FlowKV's twelve load indicators of an instance: a sliding window of summaries, normalised and weighted. Pure.

Source: FlowKV, appendix B.2. The paper names the indicators and gives neither window nor scale; here queue lengths are
divided by the largest batch, and the others are shares of what there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
from millrace.contracts.status import EngineTotals, InstanceSummary, LoadIndicators, PhaseQueues
from millrace.policies.roles import RoleInstance
from millrace.policies.stages.instance import InstanceModel


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """One summary of an instance, as far as indicators need it.

    Attributes:
        at_ns: When it was made, unix ns.
        context_tokens: Of the running batch.
    """

    at_ns: int
    blocks_free: int
    blocks_total: int
    context_tokens: int
    load: LoadIndicators


class InstanceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an instance, of which indicators are shares."""

    max_sequences: int
    token_budget: int


class Indicators(msgspec.Struct, frozen=True, kw_only=True):
    """An instance over a window. Queues are means, as shares of the largest batch.

    Attributes:
        running_prefill, waiting_prefill, preempted_prefill, moving_prefill: L_r, L_w, L_sw, L_se of prefill.
        running_decode, waiting_decode, preempted_decode, moving_decode: The same of decode.
        budget: Mean share of the token budget that a step used (T_b).
        kv: Mean share of KV blocks in use (KV_u).
        busy: Share of time in steps (G_u).
        memory: Share of time in which memory was read or written (MB_u): measured, else from the step model.
        prefill_tokens_per_s, decodes_per_s: Tokens computed per second.
        step_s: Mean time of a step; 0 where none was computed.
        prefill_tokens_left, decoding, context_tokens, blocks_growing, longest_wait_s: At the end of the window.
        kv_now: Share of KV blocks in use at its end.
        moving: Sequences whose KV leaves or arrives, at its end.
    """

    running_prefill: float = 0.0
    waiting_prefill: float = 0.0
    preempted_prefill: float = 0.0
    moving_prefill: float = 0.0
    running_decode: float = 0.0
    waiting_decode: float = 0.0
    preempted_decode: float = 0.0
    moving_decode: float = 0.0
    budget: float = 0.0
    kv: float = 0.0
    busy: float = 0.0
    memory: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decodes_per_s: float = 0.0
    step_s: float = 0.0
    prefill_tokens_left: int = 0
    decoding: int = 0
    decode_queue: int = 0
    context_tokens: int = 0
    blocks_growing: float = 0.0
    longest_wait_s: float = 0.0
    kv_now: float = 0.0
    moving: int = 0


NO_INDICATORS = Indicators()

#: Terms of the two scores, in the order of Algorithm 1, lines 10 and 11.
PREFILL_TERMS = (
    "running_prefill",
    "waiting_prefill",
    "preempted_prefill",
    "moving_prefill",
    "budget",
    "kv",
    "busy",
    "memory",
)
DECODE_TERMS = (
    "running_decode",
    "waiting_decode",
    "preempted_decode",
    "moving_decode",
    "budget",
    "kv",
    "busy",
    "memory",
)


def sample_of(body: InstanceSummary) -> LoadSample | None:
    """A summary as a sample; None where it tells no indicators, or absurd ones (negative, NaN, more than there is)."""
    load = body.indicators
    if load is None:
        return None
    counts = [body.blocks_free, body.blocks_total - body.blocks_free, body.running_tokens, body.at_ns]
    counts += [load.prefill_tokens_left, load.longest_wait_ns, load.blocks_growing]
    counts += [count for queues in (load.prefill, load.decode) for count in _counts(queues)]
    totals = load.totals
    counts += [totals.steps, totals.busy_ns, totals.decodes, totals.prefill_tokens, totals.context_tokens]
    if min(counts) < 0:
        return None
    return LoadSample(
        at_ns=body.at_ns,
        blocks_free=body.blocks_free,
        blocks_total=body.blocks_total,
        context_tokens=body.running_tokens,
        load=load,
    )


def indicators_of_instance(instance: RoleInstance) -> Indicators:
    """Of the window that a policy sees; a summary that tells absurd indicators is left out."""
    samples = [sample for body in instance.summaries if (sample := sample_of(body)) is not None]
    record = instance.record
    if record is None:
        return NO_INDICATORS
    limits = InstanceLimits(max_sequences=record.max_sequences, token_budget=record.token_budget)
    return indicators_of(samples, limits, None)


def _counts(queues: PhaseQueues) -> tuple[int, int, int, int]:
    return queues.running, queues.waiting, queues.preempted, queues.moving


def indicators_of(samples: Sequence[LoadSample], limits: InstanceLimits, model: InstanceModel | None) -> Indicators:
    """Means, rates and the last state of a window.

    Args:
        samples: Of one incarnation, oldest first.
        limits: What queues and budgets are shares of.
        model: Cost of its steps, for memory bandwidth; None where unknown.
    """
    if not samples:
        return NO_INDICATORS
    last, most = samples[-1], max(1, limits.max_sequences)
    prefill = [_mean([_counts(s.load.prefill)[i] for s in samples]) / most for i in range(4)]
    decode = [_mean([_counts(s.load.decode)[i] for s in samples]) / most for i in range(4)]
    span_s = (last.at_ns - samples[0].at_ns) / 1e9
    done = _difference(samples[0].load.totals, last.load.totals)
    rate = 1 / span_s if span_s > 0 else 0.0
    used = done.decodes + done.prefill_tokens
    return Indicators(
        running_prefill=prefill[0],
        waiting_prefill=prefill[1],
        preempted_prefill=prefill[2],
        moving_prefill=prefill[3],
        running_decode=decode[0],
        waiting_decode=decode[1],
        preempted_decode=decode[2],
        moving_decode=decode[3],
        budget=min(1.0, used / max(1, done.steps * limits.token_budget)),
        kv=_mean([_kv(s) for s in samples]),
        busy=min(1.0, done.busy_ns * rate / 1e9),
        memory=_memory(done, rate, model),
        prefill_tokens_per_s=done.prefill_tokens * rate,
        decodes_per_s=done.decodes * rate,
        step_s=done.busy_ns / done.steps / 1e9 if done.steps else 0.0,
        prefill_tokens_left=last.load.prefill_tokens_left,
        decoding=last.load.decode.running,
        decode_queue=last.load.decode.waiting + last.load.decode.preempted,
        context_tokens=last.context_tokens,
        blocks_growing=last.load.blocks_growing / max(1, last.blocks_total),
        longest_wait_s=last.load.longest_wait_ns / 1e9,
        kv_now=_kv(last),
        moving=last.load.prefill.moving + last.load.decode.moving,
    )


def _difference(first: EngineTotals, last: EngineTotals) -> EngineTotals:
    return EngineTotals(
        max(0, last.steps - first.steps),
        max(0, last.busy_ns - first.busy_ns),
        max(0, last.decodes - first.decodes),
        max(0, last.prefill_tokens - first.prefill_tokens),
        max(0, last.context_tokens - first.context_tokens),
    )


def _memory(done: EngineTotals, rate: float, model: InstanceModel | None) -> float:
    """The part of step times that reads weights and KV, by the step model; 0 without one."""
    if model is None:
        return 0.0
    reading_s = done.steps * model.fixed_s + done.decodes * model.per_decode_s
    reading_s += done.context_tokens * model.per_context_token_s
    return min(1.0, reading_s * rate, done.busy_ns * rate / 1e9)


def _kv(sample: LoadSample) -> float:
    return 1 - sample.blocks_free / sample.blocks_total if sample.blocks_total else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def score(indicators: Indicators, terms: Iterable[str], weights: Sequence[float]) -> float:
    """Weighted sum of indicators: C_i of Algorithm 1. A value that is no number counts as 0."""
    values = (float(getattr(indicators, term)) for term in terms)
    return sum(w * v for w, v in zip(weights, values, strict=True) if math.isfinite(v))
