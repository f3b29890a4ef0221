"""The latencies that requests of a cluster shall keep: as configured, else by those of the cluster without load."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from millrace.cluster import ClusterSpec
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.step_cost import StepCost
from millrace.policies.stages.risks import LatencyBounds
from millrace.workloads.recording import RequestServed

from services.coordinator.config import StepBoundsConfig
from simulator.scenarios.spec import ScenarioSpec
from simulator.whatif.figures import Objectives
from simulator.whatif.replaying import WORKER_HOPS, FittedCluster

#: Objectives over latencies without load, where none are configured. Planners of stages take the same for TPOT.
FACTOR = 5.0

#: The prompt whose time to the first token counts: most others are shorter.
PROMPT_QUANTILE = 0.9


def objectives_of(
    cluster: ClusterSpec, scenario: ScenarioSpec, fitted: FittedCluster, served: Sequence[RequestServed]
) -> Objectives:
    """Those of the stages' policy; else of step bounds, where they are on; else FACTOR times the latencies of a request
    that is alone on the slowest instance.

    Args:
        scenario: The load on the unchanged cluster.
    """
    bounds = cluster.policies.stages.parameters.get("bounds")
    if bounds is not None:
        told = msgspec.convert(bounds, LatencyBounds)
        if told.tpot_ms:
            return Objectives(ttft_ms=told.ttft_ms, tpot_ms=told.tpot_ms, source="policies.stages.parameters.bounds")
    steps = msgspec.convert(cluster.settings.coordinator.get("step_bounds", {}), StepBoundsConfig)
    if steps.tpot_s:
        return Objectives(ttft_ms=steps.ttft_s * 1e3, tpot_ms=steps.tpot_s * 1e3, source="coordinator.step_bounds")
    prompt = int(np.quantile([row.prompt for row in served], PROMPT_QUANTILE))
    context = prompt + int(np.median([max(row.outputs, default=0) for row in served]))
    costs = [(fitted.step_time(g.step_time).cost(g.engine), g.engine.token_budget) for g in scenario.cluster.groups]
    ttft_ms = max(prompt_ms(cost, prompt, budget) for cost, budget in costs) + WORKER_HOPS * fitted.worker_us / 1e3
    tpot_ms = max(cost.duration_fs(BatchComposition(decodes=1, context_tokens=context)) / 1e12 for cost, _ in costs)
    source = f"{FACTOR:g} times the latencies of a request that is alone"
    return Objectives(ttft_ms=FACTOR * ttft_ms, tpot_ms=FACTOR * tpot_ms, source=source)


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
