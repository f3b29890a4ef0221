"""Cost of a stage: tables over (first bin, last bin, instances) that planners minimise.

The objective models the running system: the number of sequences in a stage follows from their arrivals and from the
stage's pace (Little's law), and a stage must hold its sequences and its transfers.

Tables have the shape (J + 1, J + 1, E + 1): entry [i, j, d] is the stage of the bins between cut i and cut j on d
instances, ``inf`` where that is no stage or violates a constraint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from millrace.policies.stages.instance import InstanceModel
from millrace.policies.stages.paces import LengthSums, open_paces, ratio
from millrace.policies.stages.statistics import BINS, EDGES, PER_OCTAVE, Array, LengthStatistics


class Constraints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that a stage must keep.

    Attributes:
        kv_used_max: Mean share of the KV cache in use, 0 to 1.
        spare_deviations: A stage must have memory and places in batches for so many standard deviations more sequences
            than it has on average, at least 0.
        slots_used_max: Mean share of the transfer slots in use, each way, 0 to 1.
        slowdown_max: phi: no stage's time per token is more than 1 + phi times that of one stage over all lengths.
        move_gap_s: Time for which a moved sequence stands still, seconds.
    """

    kv_used_max: float = 0.85
    spare_deviations: float = 1.64
    slots_used_max: float = 0.7
    slowdown_max: float = 0.5
    move_gap_s: float = 0.02


#: A layout in force may exceed the constraints by these shares before it must change: figures of two periods differ. At
#: high load the sequences of a stage rise four times as fast as the rate, and a thousand arrivals tell it to 5 percent.
SLACK, CROWDING_SLACK = 0.15, 0.3


def relaxed(constraints: Constraints) -> Constraints:
    """The same for a layout in force."""
    return msgspec.structs.replace(
        constraints,
        spare_deviations=0.0,
        kv_used_max=min(1.0, constraints.kv_used_max * (1 + CROWDING_SLACK)),
        slots_used_max=min(1.0, constraints.slots_used_max * (1 + CROWDING_SLACK)),
        slowdown_max=(1 + constraints.slowdown_max) * (1 + SLACK) - 1,
    )


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Tables of the objective.

    Attributes:
        edges: Candidate cuts as indices into EDGES, J + 1 of them; the first is 0, the last BINS (no bound).
        cost: (J + 1, J + 1, E + 1). Adds up over stages.
        pace_s: Same shape. Seconds per output token.
        cut: (J + 1). Added for each cut at that edge; 0 at the first.
        sequences: Same shape as ``cost``. Running sequences per instance.
        context: (J + 1, J + 1). Mean context length of a stage's sequences, tokens.
    """

    edges: tuple[int, ...]
    cost: Array
    pace_s: Array
    cut: Array
    sequences: Array
    context: Array

    @property
    def instances(self) -> int:
        """E."""
        return int(self.cost.shape[2]) - 1


def candidate_edges(statistics: LengthStatistics, per_octave: int = PER_OCTAVE) -> tuple[int, ...]:
    """Edges at which a cut can make sense: between the shortest prompt and the longest sequence.

    Args:
        statistics: Of at least one sequence, else the only stage is [0, inf).
        per_octave: Cuts per octave: 1, 2 or 4.
    """
    used = np.flatnonzero(statistics.paths.sum(axis=0) + statistics.paths.sum(axis=1) + statistics.decode_tokens)
    if not len(used):
        return (0, BINS)
    stride = PER_OCTAVE // per_octave
    inner = [k for k in range(int(used[0]) + 1, int(used[-1]) + 1) if (k - 1) % stride == 0]
    return (0, *inner, BINS)


def open_costs(
    statistics: LengthStatistics,
    instance: InstanceModel,
    edges: Sequence[int],
    instances: int,
    constraints: Constraints,
) -> StageCosts:
    """Mean normalised latency of an open system: sum over stages of the share of output times the time per token.

    A sequence that decodes sees itself and the Poisson number of others, whose mean is Little's n = rate · time:
    ``t = (step(1 + n) + c3·L·(1 + n) + tail) / (1 − prefill share)``. The share is of the prompts that begin in the
    stage; a sequence that is handed over brings its KV and none.
    """
    sums = LengthSums(statistics, edges, instances)
    context = ratio(sums.of(statistics.context_tokens), sums.of(statistics.decode_tokens))
    pace, sequences, deviation = open_paces(statistics, instance, edges, instances)
    known = np.where(np.isfinite(sequences), sequences, 0.0)
    at_times = known * (1 + constraints.spare_deviations * np.where(np.isfinite(sequences), deviation, 0.0))
    fits = (known * context[:, :, None] <= constraints.kv_used_max * instance.kv_tokens) & (
        at_times * np.maximum(1.0 / instance.max_sequences, context[:, :, None] / instance.kv_tokens) <= 1.0
    )
    fits &= np.isfinite(sequences)
    moves = [_moves_per_s(statistics, edge) for edge in edges]
    busy = np.asarray([rate * instance.copy_s(_length(edge)) for rate, edge in zip(moves, edges, strict=True)])
    slots = np.maximum(busy[:, None], busy[None, :])[:, :, None] / (instance.copies_max * sums.instances)
    allowed = sums.valid & fits & (slots <= constraints.slots_used_max)
    weight = sums.of(statistics.weight)[:, :, None] / max(1.0, statistics.requests)
    per_move = constraints.move_gap_s / max(1.0, statistics.output_tokens_mean)
    rate = max(statistics.requests_per_s, 1e-12)
    return StageCosts(
        edges=tuple(edges),
        cost=np.where(allowed & np.isfinite(pace), weight * np.where(np.isfinite(pace), pace, 0.0), np.inf),
        pace_s=pace,
        cut=np.asarray(moves) / rate * per_move,
        sequences=sequences,
        context=context,
    )


def fair(costs: StageCosts, slowdown_max: float) -> StageCosts:
    """The same without stages that are slower than (1 + slowdown_max) times one stage over all lengths."""
    bound = (1 + slowdown_max) * costs.pace_s[0, -1, costs.instances]
    if not math.isfinite(bound):
        return costs
    slow = costs.pace_s > bound * (1 + 1e-9)
    return replace(costs, cost=np.where(slow, np.inf, costs.cost))


def holding(costs: StageCosts, statistics: LengthStatistics, instance: InstanceModel, pace_s: Array) -> StageCosts:
    """The same without stages that could not hold the sequences that run now.

    A slow layout holds more sequences than a fast one at the same rate. Entered at once, the fast one would begin with
    stages that are full: newcomers queue for minutes, and nobody can move on.

    Args:
        pace_s: (BINS) seconds per token now, by length.
    """
    sums, per_s = LengthSums(statistics, costs.edges, costs.instances), pace_s / (statistics.span_s or 1.0)
    running = sums.of(statistics.decode_tokens * per_s)[:, :, None] / instance.max_sequences
    held = sums.of(statistics.context_tokens * per_s)[:, :, None] / instance.kv_tokens
    fits = np.maximum(running, held) <= sums.instances
    return replace(costs, cost=np.where(fits, costs.cost, np.inf))


def priced(costs: StageCosts, cut_margin: float) -> StageCosts:
    """The same with each cut costing a share of what one stage over all lengths costs."""
    one = float(costs.cost[0, -1, costs.instances])
    if not math.isfinite(one):
        return costs
    return replace(costs, cut=costs.cut + cut_margin * one)


def _moves_per_s(statistics: LengthStatistics, edge: int) -> float:
    return statistics.crossing(edge) / (statistics.span_s or 1.0) if 0 < edge < BINS else 0.0


def _length(edge: int) -> float:
    return float(EDGES[edge]) if edge < BINS else float(EDGES[-1])
