"""A bound that no policy can pass: what the engines could do with perfect packing and nobody ever waiting."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.contracts.status import BatchComposition
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import StepCost
from millrace.workloads.shape import RequestShape

from simulator.scenarios.spec import Group, ScenarioSpec


def fluid_bound(spec: ScenarioSpec, shapes: Sequence[RequestShape]) -> float:
    """Requests per second of all instances together, without prefix hits.

    Every instance decodes as many sequences as its memory or its batch holds, all the time, and prompts come in equal
    portions with every step. Costs of a step are convex, so real steps, which vary, take longer on average. Source:
    the fluid bound of NOTES.md, part A3.
    """
    return sum(group.instances * _instance_rate(group, shapes) * group.speed for group in spec.cluster.groups)


def resident_tokens(shapes: Sequence[RequestShape]) -> float:
    """Mean context of a sequence that decodes: each output token finds the prompt and the output before it."""
    tokens = sum(shape.output_tokens for shape in shapes)
    return sum(s.output_tokens * (s.prompt_tokens + s.output_tokens / 2) for s in shapes) / tokens


def _instance_rate(group: Group, shapes: Sequence[RequestShape]) -> float:
    engine = group.engine
    cost = load_step_time(group.step_time).cost(engine)
    return max(_rate(decodes, cost, shapes) for decodes in range(1, _decodes_max(engine, shapes) + 1))


def _decodes_max(engine: EngineParameters, shapes: Sequence[RequestShape]) -> int:
    blocks = (resident_tokens(shapes) + engine.block_size / 2) / engine.block_size
    return max(1, min(engine.max_sequences, round(engine.blocks_total / blocks)))


def _rate(decodes: int, cost: StepCost, shapes: Sequence[RequestShape]) -> float:
    """Requests per second of an instance that decodes so many sequences in each step."""
    count = len(shapes)
    # The prompt's last step gives the first token; the others take a decode each.
    per_step = decodes / max(1e-9, sum(shape.output_tokens - 1 for shape in shapes) / count)
    prompts = per_step * sum(shape.prompt_tokens for shape in shapes) / count
    work = per_step * sum(shape.prompt_tokens**2 / 2 for shape in shapes) / count
    batch = BatchComposition(
        decodes=decodes,
        prefills=round(per_step),
        prefill_tokens=round(prompts),
        prefill_work=work,
        context_tokens=round(decodes * resident_tokens(shapes)),
    )
    return per_step / (cost.duration_fs(batch) / 1e15)
