"""An engine's limits and step cost, as the compiled module takes them."""

from __future__ import annotations

import math

from millrace.contracts.kv import KvNeed
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import CostCurve, StepCost
from millrace.native import enginemodel


def native_limits(parameters: EngineParameters) -> enginemodel.Limits:
    """The engine as a forecast knows it: first come first served, no prefix index, blocks counted."""
    grows = [group.block_tokens for group in parameters.groups if group.need is not KvNeed.STATE]
    return enginemodel.Limits(
        max_model_len=parameters.max_model_len,
        block_size=math.gcd(*grows) or parameters.block_size,
        max_sequences=parameters.max_sequences,
        token_budget=parameters.token_budget,
        long_prefill_token_threshold=parameters.long_prefill_token_threshold,
        chunked_prefill=parameters.chunked_prefill,
        reserve_full_prompt=parameters.reserve_full_prompt,
        watermark=parameters.watermark,
        async_scheduling=parameters.async_scheduling,
        groups=[(group.block_tokens, group.blocks_max) for group in parameters.groups],
    )


def native_cost(cost: StepCost) -> enginemodel.StepCost:
    """Equal to the femtosecond."""
    return enginemodel.StepCost(
        fixed=cost.fixed,
        decode=cost.decode,
        prefill_token=cost.prefill_token,
        context_token=cost.context_token,
        tail_token=cost.tail_token,
        tail_decodes=cost.tail_decodes,
        prefill_half_work=cost.prefill_half_work,
        mixed_decode=cost.mixed_decode,
        mixed_context_token=cost.mixed_context_token,
        mixed_work=cost.mixed_work,
        tokens=_curves(cost.tokens),
        sequences=_curves(cost.sequences),
        decode_context=_curves(*cost.decode_context),
        prefill_work=_curves(*cost.prefill_work),
        mixed_context=_curves(*cost.mixed_context),
        prefill_granularity=cost.prefill_granularity,
    )


def _curves(*curves: CostCurve | None) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    return [(curve.starts, curve.values_fs, curve.slopes_fs) for curve in curves if curve is not None]
