"""Pipelines of tensor-parallel engines as the planner's lanes (``millrace.cascade.replicas``)."""

from __future__ import annotations

import msgspec
from millrace.enginemodel.step_cost import FS_PER_NS

from papers.cascadia.replicas import ReplicaShape


def pipelined(shape: ReplicaShape, *, stages: int, hop_ns: float, hop_token_ns: float, blocks: int) -> ReplicaShape:
    """A pipeline of tensor-parallel stages, as lanes (see ``ReplicaShape``).

    A batch passes all stages one after the other, which takes as long as on one tensor-parallel engine that holds all
    layers; as many batches are under way as there are stages. Bubbles of unequal stages are not modelled.

    Args:
        shape: One engine with all layers; its memory does not matter.
        hop_ns: From one stage to the next, of a step.
        hop_token_ns: The same of each token computed in the step.
        blocks: KV blocks of the whole pipeline.
    """
    hops = stages - 1
    per_token = round(hops * hop_token_ns * FS_PER_NS)
    cost = msgspec.structs.replace(
        shape.cost,
        fixed=shape.cost.fixed + round(hops * hop_ns * FS_PER_NS),
        decode=shape.cost.decode + per_token,
        prefill_token=shape.cost.prefill_token + per_token,
    )
    parameters = msgspec.structs.replace(shape.parameters, blocks_total=blocks // stages)
    return ReplicaShape(tensor=shape.tensor, pipeline=stages, cost=cost, parameters=parameters)
