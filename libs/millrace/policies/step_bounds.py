"""Bounds of steps in which prompts would hold up decodes: a step beside decodes computes so many tokens at most. Pure.

A bounded step leaves decodes their objective. Each step pays for its decodes, so bounded steps compute fewer prompt
tokens per second; where prompts would wait longer than their own objective for it, that may cost SLOWDOWN_MAX.
"""

from __future__ import annotations

import math

import msgspec

from millrace.contracts.bounds import Span, Wait
from millrace.policies.stages.instance import InstanceModel

#: Share of the objective of a decode that a step which carries prompts may take.
STEP_SHARE = 0.8

#: No step is bounded to fewer tokens.
STEP_TOKENS_MIN = 512.0

#: Share of the prompt tokens per second that bounded steps may cost where prompts wait longer than their objective.
SLOWDOWN_MAX = 0.1

#: A loaded instance computes no step faster than this when its share of time is computed, seconds.
STEP_S_MIN = 1e-6


class StepLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One instance now.

    Attributes:
        backlog: Prompt tokens to compute.
        decoding: Sequences that decode or wait to.
        context: Tokens of their contexts.
        prompt: Mean prompt tokens of new requests, prefix hits left out.
        arrives: Whether new requests come to it.
    """

    backlog: float
    decoding: float
    context: float
    prompt: float
    arrives: bool


class StepObjectives(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for smaller steps where prompts hold up decodes.

    Attributes:
        tpot_s: Objective of the time per output token, seconds; 0 bounds no step.
        ttft_s: Objective of the time to the first token, seconds: prompts that would miss it get longer steps.
    """

    tpot_s: Wait = 0.0
    ttft_s: Span = 3.0


def step_bound(load: StepLoad, model: InstanceModel, budget: int, objectives: StepObjectives) -> int | None:
    """Tokens that a step may have now; None where its own budget may stand.

    Args:
        budget: Tokens of a step, as its engine started.
    """
    if load.decoding < 1 or not (load.backlog or load.arrives):
        return None
    tokens = math.ceil(load.decoding + _chunk(load, model, budget, objectives))
    return tokens if tokens < budget else None


def _chunk(load: StepLoad, model: InstanceModel, budget: int, objectives: StepObjectives) -> float:
    """Prompt tokens of a step: all that decodes leave, or fewer where they would wait too long."""
    fixed_s = model.fixed_s + load.decoding * model.per_decode_s + load.context * model.per_context_token_s
    decode_s, prompt = max(STEP_S_MIN, fixed_s), max(1.0, load.prompt)
    token_s = model.per_prefill_token_s + model.per_prefill_work_s * prompt / 2
    full = max(1.0, budget - load.decoding)
    least = max(1.0, STEP_TOKENS_MIN - load.decoding)
    wanted = min(full, max(least, (STEP_SHARE * objectives.tpot_s - decode_s) / token_s))
    if (load.backlog + prompt) * (token_s + decode_s / wanted) <= objectives.ttft_s:
        return wanted
    slowest_s = (token_s + decode_s / full) / (1 - SLOWDOWN_MAX)
    return min(full, max(wanted, decode_s / (slowest_s - token_s)))
