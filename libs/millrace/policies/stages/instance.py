"""An instance as planners see it: what a step costs, what its memory holds, how fast it hands sequences over."""

from __future__ import annotations

import msgspec

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost
from millrace.policies.stages.curves import StepCurves, sampled
from millrace.policies.stages.least_squares import nonnegative

#: Batch sizes and mean context lengths at which a step cost is sampled to make it linear.
_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXTS = (64, 256, 1024, 4096, 16_384)
_PROMPTS = (256, 1024, 4096, 16_384, 65_536)


class InstanceModel(msgspec.Struct, frozen=True, kw_only=True):
    """Linear costs of one instance; all instances of a plan are alike.

    Attributes:
        fixed_s: Any step, seconds.
        per_decode_s: Each decoding sequence.
        per_context_token_s: Each token of context that attention reads.
        per_prefill_token_s: Each prompt token computed.
        per_prefill_work_s: Each squared token of prompt attention.
        tail_s: Each token by which the longest sequence of a batch exceeds the mean; 0 where kernels split the work.
        tail_decodes_min: The tail costs nothing in smaller batches.
        kv_tokens: Tokens that its KV cache holds.
        copy_bytes_per_s: Bandwidth of one transfer.
        copy_overhead_s: Time of a transfer beside its bytes.
        copies_max: Transfers each way at once.
        curves: Sampled step times, where costs bend; None for the lines above.
    """

    fixed_s: float
    per_decode_s: float
    per_context_token_s: float
    per_prefill_token_s: float = 0.0
    per_prefill_work_s: float = 0.0
    tail_s: float = 0.0
    tail_decodes_min: int = 0
    kv_tokens: float = float("inf")
    max_sequences: float = float("inf")
    kv_bytes_per_token: float = 131_072.0
    copy_bytes_per_s: float = 10e9
    copy_overhead_s: float = 0.05
    copies_max: int = 3
    curves: StepCurves | None = None

    def copy_s(self, length_tokens: float) -> float:
        """Seconds for which a sequence of this length holds a transfer slot."""
        return self.copy_overhead_s + length_tokens * self.kv_bytes_per_token / self.copy_bytes_per_s

    def step_curves(self) -> StepCurves:
        """Return what was sampled, or the lines as curves."""
        return self.curves or StepCurves.straight(
            fixed_s=self.fixed_s,
            decode_s=self.per_decode_s,
            token_s=self.per_prefill_token_s,
            work_s=self.per_prefill_work_s,
        )


def linear_instance(
    cost: StepCost, *, kv_tokens: int, max_sequences: int, token_budget: int = EngineParameters().token_budget
) -> InstanceModel:
    """Makes a step cost linear: least relative error over batches that fit into the memory.

    Curves of tables and bends become straight lines, and are kept beside them as samples; an engine's own scheduler and
    forecasts keep the full cost. What unequal lengths cost is taken from the difference between an uneven and an even
    batch.
    """
    rows, times = [], []
    for decodes in _DECODES:
        for context in _CONTEXTS:
            if decodes <= max_sequences and decodes * context <= max(kv_tokens, _CONTEXTS[0]):
                rows.append((1.0, float(decodes), float(decodes * context)))
                times.append(_seconds(cost, decodes=decodes, context_tokens=decodes * context))
    fixed, per_decode, per_context = nonnegative(rows, times)
    chunks = [(float(tokens), tokens * tokens / 2.0) for tokens in _PROMPTS]
    base = _seconds(cost, decodes=8, context_tokens=8 * 1024)
    extra = [_prefill_s(cost, tokens) - base for tokens in _PROMPTS]
    per_token, per_work = nonnegative(chunks, extra)
    tail_s, decodes_min = _tail(cost, max_sequences)
    return InstanceModel(
        fixed_s=fixed,
        per_decode_s=per_decode,
        per_context_token_s=per_context,
        per_prefill_token_s=per_token,
        per_prefill_work_s=per_work,
        tail_s=tail_s,
        tail_decodes_min=decodes_min,
        kv_tokens=float(kv_tokens),
        max_sequences=float(max_sequences),
        curves=sampled(cost, per_context_token_s=per_context, token_budget=token_budget),
    )


def _tail(cost: StepCost, max_sequences: int) -> tuple[float, int]:
    """Seconds per token of the longest above the mean, and the smallest batch in which it costs that."""
    for decodes in _DECODES:
        if decodes > max(1, max_sequences) or decodes < 2:
            continue
        context, longest = decodes * 1024, 64 * 1024
        even = _seconds(cost, decodes=decodes, context_tokens=context, longest=1024)
        uneven = _seconds(cost, decodes=decodes, context_tokens=context, longest=longest)
        if uneven > even:
            return (uneven - even) / (longest - 1024), decodes
    return 0.0, 0


def _seconds(cost: StepCost, *, decodes: int, context_tokens: int, longest: int = 0) -> float:
    batch = BatchComposition(
        decodes=decodes, context_tokens=context_tokens, longest_context=longest or context_tokens // decodes
    )
    return cost.duration_fs(batch) / FS_PER_NS / 1e9


def _prefill_s(cost: StepCost, tokens: int) -> float:
    """A step with eight decodes and one chunk."""
    batch = BatchComposition(
        decodes=8,
        prefills=1,
        prefill_tokens=tokens,
        context_tokens=8 * 1024 + tokens,
        prefill_work=tokens * tokens / 2,
        prefill_context_tokens=tokens,
        longest_context=1024,
    )
    return cost.duration_fs(batch) / FS_PER_NS / 1e9
