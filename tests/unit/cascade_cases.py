"""Judged requests and tiers for tests of cascade plans."""

import numpy as np
from millrace.cascade.chain import TierService, equal_instances
from millrace.cascade.sample import JudgedSample
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters

PARAMETERS = EngineParameters(max_model_len=4096, blocks_total=4096, max_sequences=64)
#: An H100 with an 8B model.
COST = load_step_time("h100-llama-3-8b")


def judged(count: int = 400, seed: int = 0) -> JudgedSample:
    """Scores that say how good an answer is within some points; the largest model is the best on average."""
    rng = np.random.default_rng(seed)
    scores = np.clip(rng.normal(70, 20, (count, 2)), 0, 100)
    quality = np.clip(np.column_stack([scores + rng.normal(0, 5, (count, 2)), rng.normal(90, 6, count)]), 0, 100)
    prompts = np.repeat(rng.integers(50, 800, (count, 1)), 3, axis=1)
    return JudgedSample(
        scores=scores, quality=quality, prompt_tokens=prompts, output_tokens=rng.integers(10, 120, (count, 3))
    )


def tiers(*counts: int) -> list[TierService | None]:
    """So many instances of models that are 1, 3 and 8 times as slow as an 8B one."""
    return [
        equal_instances(count, COST.times(factor).cost(PARAMETERS), PARAMETERS)
        for factor, count in zip((1.0, 3.0, 8.0), counts, strict=True)
    ]
