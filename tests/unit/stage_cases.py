"""Tables, lengths and views for tests of stage planners."""

import itertools
import math
import random
from collections.abc import Iterator

import msgspec
import numpy as np
from millrace.policies.stages import STAGE_POLICIES, PlanningView, StageDecision, search
from millrace.policies.stages.instance import InstanceModel
from millrace.policies.stages.objectives import StageCosts
from millrace.policies.stages.statistics import LengthStatistics, statistics_of

H200 = InstanceModel(
    fixed_s=6.224e-3,
    per_decode_s=9.3e-6,
    per_context_token_s=30.81e-9,
    per_prefill_token_s=13e-6,
    per_prefill_work_s=0.9152e-9,
    kv_tokens=900_000,
    max_sequences=1024,
)


def table(rng: random.Random, cuts: int, instances: int, *, holes: float = 0.0) -> StageCosts:
    """A table of random costs; some entries violate a constraint."""
    shape = (cuts + 1, cuts + 1, instances + 1)
    cost = np.full(shape, np.inf)
    for i, j in itertools.combinations(range(cuts + 1), 2):
        for d in range(1, instances + 1):
            if rng.random() >= holes:
                cost[i, j, d] = rng.uniform(0, 10)
    cut = np.asarray([rng.uniform(0, 1) for _ in range(cuts + 1)])
    return StageCosts(
        edges=tuple(range(cuts + 1)),
        cost=cost,
        pace_s=np.ones(shape),
        cut=cut,
        sequences=np.ones(shape),
        context=np.ones(shape[:2]),
    )


def partitions(cuts: int, instances: int) -> Iterator[list[search.Part]]:
    """Every partition of ``cuts`` tiers and ``instances`` into stages."""
    for stages in range(1, min(cuts, instances) + 1):
        for inner in itertools.combinations(range(1, cuts), stages - 1):
            bounds = [0, *inner, cuts]
            for split in itertools.combinations(range(1, instances), stages - 1):
                marks = [0, *split, instances]
                yield [(bounds[k], bounds[k + 1], marks[k + 1] - marks[k]) for k in range(stages)]


def lognormal(
    seed: int, count: int = 3000, *, sigma: float = 1.3, median: float = 900.0
) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    prompts = [max(1, round(rng.lognormvariate(math.log(300), 1.0))) for _ in range(count)]
    outputs = [max(1, min(60_000, round(rng.lognormvariate(math.log(median), sigma)))) for _ in range(count)]
    return prompts, outputs


def statistics(rate: float, seed: int = 0, **shape: float) -> LengthStatistics:
    prompts, outputs = lognormal(seed, **shape)  # type: ignore[arg-type]
    return statistics_of(prompts, outputs, span_s=len(prompts) / rate)


def view(rate: float, instances: int = 16, **shape: float) -> PlanningView:
    return PlanningView(instances=instances, statistics=statistics(rate, **shape), instance=H200)


def decide(name: str, seen: PlanningView, **parameters: object) -> StageDecision:
    policy = STAGE_POLICIES.load(name)
    decision = policy.decide(seen, msgspec.convert(parameters, policy.parameters))
    assert decision.shapes[0].length_min == 0
    assert decision.shapes[-1].length_max is None
    for before, after in itertools.pairwise(decision.shapes):
        assert before.length_max == after.length_min
    return decision
