"""Figures of a scenario's run that rescheduling changes: moves of running sequences, and how even the loads are."""

from __future__ import annotations

import numpy as np
from millrace.contracts.broker import MoveReason
from millrace.contracts.migration import MigrationOutcome
from millrace.contracts.plan import InstanceRole

from simulator.scenarios.running import ScenarioOutcome

_RESCHEDULED = frozenset(map(str, (MoveReason.ORDER, MoveReason.MEMORY, MoveReason.BOUNDARY, MoveReason.BALANCE)))


def rescheduling(outcome: ScenarioOutcome) -> dict[str, float]:
    """Further figures of a row.

    Returns:
        ``moves``: Sequences moved for balance, memory or a boundary; neither hand-offs nor drains. ``moved_bytes``: KV
        that those moves carried. ``load_variance``: Of KV tokens held, over the instances that decode, mean over the
        samples between the last arrival of the warm-up and the last arrival, tokens²; missing without samples there.
    """
    moves = [m for m in outcome.migrations if m.outcome == MigrationOutcome.MOVED and m.reason in _RESCHEDULED]
    figures: dict[str, float] = {"moves": len(moves), "moved_bytes": sum(move.bytes for move in moves)}
    variance = _load_variance(outcome)
    return figures if variance is None else {**figures, "load_variance": variance}


def _load_variance(outcome: ScenarioOutcome) -> float | None:
    spec = outcome.spec
    times = [record.arrival_ns for record in outcome.finished if record.number >= spec.workload.warm_up]
    if not times:
        return None
    roles = spec.migration.instance_roles(spec.instances())
    block_size = {name: group.engine.block_size for group in spec.cluster.groups for name in group.names()}
    held: dict[int, list[int]] = {}
    for sample in outcome.samples:
        decodes = roles.get(sample.instance) is not InstanceRole.PREFILL and sample.instance in block_size
        if decodes and min(times) <= sample.at_ns <= max(times):
            held.setdefault(sample.at_ns, []).append(sample.blocks_used * block_size[sample.instance])
    return float(np.mean([np.var(tokens) for tokens in held.values()])) if held else None
