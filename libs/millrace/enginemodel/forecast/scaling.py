"""A step cost stretched by a calibration factor."""

from __future__ import annotations

from millrace.enginemodel.step_cost import CostCurve, StepCost


def scaled(cost: StepCost, scale: float) -> StepCost:
    """The same engine, ``scale`` times as slow: every coefficient times ``scale``, rounded to a femtosecond.

    Raises ValueError where ``scale`` is not positive and finite.
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be positive and finite, is {scale}")
    if scale == 1.0:
        return cost
    return StepCost(
        fixed=round(cost.fixed * scale),
        decode=round(cost.decode * scale),
        prefill_token=round(cost.prefill_token * scale),
        context_token=round(cost.context_token * scale),
        tail_token=round(cost.tail_token * scale),
        tail_decodes=cost.tail_decodes,
        prefill_half_work=round(cost.prefill_half_work * scale),
        mixed_decode=round(cost.mixed_decode * scale),
        mixed_context_token=round(cost.mixed_context_token * scale),
        mixed_work=round(cost.mixed_work * scale),
        tokens=None if cost.tokens is None else _scaled(cost.tokens, scale),
        sequences=None if cost.sequences is None else _scaled(cost.sequences, scale),
        decode_context=tuple(_scaled(curve, scale) for curve in cost.decode_context),
        prefill_work=tuple(_scaled(curve, scale) for curve in cost.prefill_work),
        mixed_context=tuple(_scaled(curve, scale) for curve in cost.mixed_context),
        prefill_granularity=cost.prefill_granularity,
    )


def _scaled(curve: CostCurve, scale: float) -> CostCurve:
    values, slopes = (tuple(round(value * scale) for value in row) for row in (curve.values_fs, curve.slopes_fs))
    return CostCurve(curve.starts, values, slopes)
