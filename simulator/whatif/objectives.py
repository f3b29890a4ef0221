"""The latencies that requests of a cluster shall keep: as configured, else by those of the cluster without load."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from millrace.cluster.spec import ClusterSpec
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.step_cost import StepCost
from millrace.policies.objectives import FACTOR, UNLOADED, Objectives, configured_objectives
from millrace.policies.step_bounds import StepObjectives
from millrace.workloads.recording import RequestServed

from simulator.scenarios.spec import ScenarioSpec
from simulator.whatif.replaying import WORKER_HOPS, FittedCluster

#: The prompt whose time to the first token counts: most others are shorter.
PROMPT_QUANTILE = 0.9


def objectives_of(
    cluster: ClusterSpec, scenario: ScenarioSpec, fitted: FittedCluster, served: Sequence[RequestServed]
) -> Objectives:
    """As configured; else FACTOR times the latencies of a request that is alone on the slowest instance.

    Args:
        scenario: The load on the unchanged cluster.
    """
    steps = msgspec.convert(cluster.settings.coordinator.get("step_bounds", {}), StepObjectives)
    configured = configured_objectives(cluster.policies.stages.parameters, steps)
    if configured is not None:
        return configured
    prompt = int(np.quantile([row.prompt for row in served], PROMPT_QUANTILE))
    context = prompt + int(np.median([max(row.outputs, default=0) for row in served]))
    costs = [(fitted.step_time(g.step_time).cost(g.engine), g.engine.token_budget) for g in scenario.cluster.groups]
    ttft_ms = max(prompt_ms(cost, prompt, budget) for cost, budget in costs) + WORKER_HOPS * fitted.worker_us / 1e3
    tpot_ms = max(cost.duration_fs(BatchComposition(decodes=1, context_tokens=context)) / 1e12 for cost, _ in costs)
    return Objectives(ttft_ms=FACTOR * ttft_ms, tpot_ms=FACTOR * tpot_ms, source=UNLOADED)


def prompt_ms(cost: StepCost, prompt: int, budget: int) -> float:
    """Time of the steps that compute a prompt alone."""
    total, done = 0, 0
    while done < prompt:
        chunk = min(budget, prompt - done)
        done += chunk
        total += cost.duration_fs(
            BatchComposition(
                prefills=1,
                prefill_tokens=chunk,
                context_tokens=done,
                prefill_work=chunk * (done - chunk / 2),
                prefill_context_tokens=done,
            )
        )
    return total / 1e12
