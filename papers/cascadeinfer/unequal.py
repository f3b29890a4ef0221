"""Cost of unequal lengths in one decode batch, by one number κ without a dimension. Pure."""

from __future__ import annotations

import math

import msgspec
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.step_time_models import LinearStepTime

#: Share of the multiprocessors, doubled, from which on FlashAttention-2 does not split a sequence's KV over several.
#: Source: ``num_splits_heuristic`` of flash-attention 2.
NOT_SPLIT_FROM = 0.8

#: Between the name of a set and its κ in a scenario's ``step_time``.
WITH = " with kappa "


def unequal(model: LinearStepTime, kappa: float, *, per_head: float) -> LinearStepTime:
    """The same engine where unequal lengths cost so much.

    Decode attention then takes ``1 + kappa·r·(1 - mean/longest)`` times as long as with equal lengths, with
    ``r = longest·multiprocessors/(Σ context·KV heads)``, in batches that the kernel does not split.

    Args:
        kappa: 0 for kernels that split; 0.15 to 0.20 in the public FlashAttention-2 data (bench step_time_skew), 0.76
            for the largest penalty in the paper's figure 2.
        per_head: Multiprocessors of the GPU per KV head of the model.
    """
    assert kappa >= 0, f"kappa must be at least 0, is {kappa}"
    cost = kappa * model.per_context_token * per_head
    return msgspec.structs.replace(model, per_tail_token=cost, tail_decodes=not_split_from(per_head))


def not_split_from(per_head: float) -> int:
    """Decoding sequences from which on FlashAttention-2 gives each of them one multiprocessor per head."""
    return math.ceil(NOT_SPLIT_FROM * 2 * per_head)


#: Multiprocessors per KV head behind the set that the comparisons run on.
PER_HEAD = {"h200-llama-3-8b": 132 / 8}


def load_unequal(name: str) -> LinearStepTime:
    """A set by its name, with a penalty where the name ends in ``with kappa NUMBER``."""
    plain, _, kappa = name.partition(WITH)
    model = load_step_time(plain)
    return unequal(model, float(kappa), per_head=PER_HEAD[plain]) if kappa else model
