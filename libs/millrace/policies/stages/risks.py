"""Share of requests that a layout is expected to keep from their latency bounds (SLO), in closed form.

The mean time per token of a stage says nothing about its bad moments. Three things make them, each per stage:

- The number of running sequences. A stage whose instances are level is a processor-sharing queue whose speed depends on
  the number of sequences: ``P(N) ~ prod V / phi(k)`` for any distribution of lengths, with the tokens ``V`` that arrive
  per second and the tokens ``phi(k)`` that k sequences decode per second.
- Prompts that come close together: their work within the life of a sequence has the variance of a compound Poisson
  process, spread over the instances of the stage.
- Waiting for the first token: behind other prompts (M/G/d by Sakasegawa's approximation, an exponential tail), and for
  a place in a full batch.

A request's time per token is the mean over the stages that it passes, weighted by its tokens there.

Sources: Cohen, The multiple phase service network with generalized processor sharing, 1979 (insensitivity);
Sakasegawa, An approximation formula Lq, 1977.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.policies.stages.instance import InstanceModel
from millrace.policies.stages.paces import LengthSums, prefill_s_per_s, step_s
from millrace.policies.stages.search import Part
from millrace.policies.stages.statistics import EDGES, Array, LengthStatistics

#: Grid points of the number of sequences per instance, and its end as a multiple of the largest batch.
_POINTS, _BEYOND = 1024, 2.0

#: Points at which the time of prompts is computed; it changes slowly with the number of sequences.
_SAMPLES = 24

#: Token budgets of steps that prompts are cut into; only the number of steps of a long prompt depends on it.
_CHUNK = 8192


class LatencyBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds that requests shall keep, and what a layout may cost.

    Attributes:
        ttft_ms: Time to the first token, milliseconds; above 0.
        tpot_ms: Mean time per output token after the first, milliseconds; 0 for five times that of one sequence alone.
        loss_max: By how much the expected share of requests beyond their bounds may exceed that of one stage, 0 to 1. 1
            takes any layout.
    """

    ttft_ms: float = 1_000.0
    tpot_ms: float = 0.0
    loss_max: float = 0.005

    def __post_init__(self) -> None:
        if not (self.ttft_ms > 0 and self.tpot_ms >= 0 and 0 <= self.loss_max <= 1):
            raise ValueError(f"bounds out of range: {self}")


#: Of an idle engine's time per token, where no bound is named.
_IDLE_TIMES = 5.0


@dataclass(frozen=True, kw_only=True)
class StageState:
    """A stage in its steady state.

    Attributes:
        pace_s: Seconds per token, mean over tokens.
        pace_deviation: Relative standard deviation from the number of sequences.
        burst_s: Variance of the prompt time per second and instance, times seconds: divided by a window it is that of
            the share that prompts take within the window.
        free: Share of time that prompts leave.
        full: Share of sequences that find every batch full.
        sequences: Mean number per instance.
        wait_s: Mean wait of a prompt behind others, given that it waits.
        waits: Share of prompts that wait.
    """

    pace_s: float
    pace_deviation: float
    burst_s: float
    free: float
    full: float
    sequences: float
    wait_s: float
    waits: float


def over_bounds(
    statistics: LengthStatistics,
    instance: InstanceModel,
    edges: Sequence[int],
    parts: Sequence[Part],
    bounds: LatencyBounds,
) -> float:
    """Expected share of requests beyond a bound, 0 to 1; 1 for a layout without a steady state.

    Args:
        edges: Cuts that ``parts`` count in, as indices into EDGES.
    """
    states = [stage_state(statistics, instance, (edges[i], edges[j]), d) for i, j, d in parts]
    if not states or any(state is None for state in states):
        return 1.0
    known = [state for state in states if state is not None]
    cuts = np.asarray([EDGES[edges[i]] for i, _, _ in parts], dtype=np.float64)
    start, end = np.nonzero(statistics.paths)
    prompts, finals = _middle(start), np.maximum(_middle(end), _middle(start) * 1.05)
    tpot_s = bounds.tpot_ms / 1e3 or _IDLE_TIMES * _alone_s(statistics, instance)
    slow = _slow(known, cuts, prompts, finals, tpot_s)
    late = _late(instance, known, cuts, prompts, bounds.ttft_ms / 1e3)
    weight = statistics.paths[start, end]
    return float((weight * (1 - (1 - slow) * (1 - late))).sum() / max(1e-12, weight.sum()))


def stage_state(
    statistics: LengthStatistics, instance: InstanceModel, edges: tuple[int, int], instances: int
) -> StageState | None:
    """Steady state of the stage between two edges; None where more comes than it can serve."""
    sums, span_s = LengthSums(statistics, edges, instances), statistics.span_s or 1.0
    decoded = float(sums.of(statistics.decode_tokens)[0, 1]) / span_s
    context = float(sums.of(statistics.context_tokens)[0, 1]) / span_s / max(1e-12, decoded)
    most = max(1.0, min(instance.max_sequences, 8192.0, instance.kv_tokens / max(1.0, context)))
    n = np.linspace(_BEYOND * most / _POINTS, _BEYOND * most, _POINTS)
    running = np.minimum(n, most)
    coarse = np.linspace(running[0], most, _SAMPLES)
    step = step_s(statistics, instance, edges, running)[0, 1]
    busy = np.interp(running, coarse, prefill_s_per_s(statistics, instance, sums, coarse)[0, 1]) / instances
    free = np.maximum(1e-9, 1 - busy)
    rate = running * free / step * instances
    if decoded > 0 and rate.max() <= decoded:
        return None
    if decoded <= 0:
        share = np.eye(1, _POINTS)[0]
    else:
        likely = -np.cumsum(np.log(rate / decoded)) * (n[1] - n[0]) * instances
        share = np.exp(likely - likely.max())
        share = share * n / (share * n).sum()
    pace = step / free
    mean = float((share * pace).sum())
    at = float((share * n).sum())
    prompt_s, squares = _prompt_moments(statistics, instance, edges, at)
    taken = float(np.interp(at, n, busy))
    waits = min(1.0, taken) ** (math.sqrt(2 * (instances + 1)) - 1)
    wait_s = squares / max(1e-12, 2 * prompt_s * instances * max(1e-9, 1 - taken))
    return StageState(
        pace_s=mean,
        pace_deviation=math.sqrt(max(0.0, float((share * pace**2).sum()) - mean**2)) / mean,
        burst_s=squares / instances**2,
        free=max(1e-9, 1 - taken),
        full=float(share[n > most].sum()),
        sequences=at,
        wait_s=wait_s,
        waits=waits,
    )


def _prompt_moments(
    statistics: LengthStatistics, instance: InstanceModel, edges: tuple[int, int], decodes: float
) -> tuple[float, float]:
    """Sum and sum of squares of the prompts' times, per second of the period."""
    began = statistics.paths.sum(axis=1)[edges[0] : edges[1]]
    tokens = statistics.prefill_tokens[edges[0] : edges[1]]
    mean = np.divide(tokens, began, out=np.zeros_like(tokens), where=began > 0)
    each = mean * instance.step_curves().prompt(decodes, mean)
    span_s = statistics.span_s or 1.0
    return float((began * each).sum()) / span_s, float((began * each**2).sum()) / span_s


def _slow(states: Sequence[StageState], cuts: Array, prompts: Array, finals: Array, bound_s: float) -> Array:
    """Share of each path's requests whose time per token is beyond the bound, by a normal tail."""
    ends = np.append(cuts[1:], np.inf)
    tokens = np.clip(finals, cuts[:, None], ends[:, None]) - np.clip(prompts, cuts[:, None], ends[:, None])
    pace = np.asarray([state.pace_s for state in states])[:, None]
    life_s = np.maximum(1e-3, tokens * pace)
    burst = np.asarray([math.sqrt(state.burst_s) / state.free for state in states])[:, None] / np.sqrt(life_s)
    deviation = np.hypot(np.asarray([state.pace_deviation for state in states])[:, None], burst)
    part = tokens / tokens.sum(axis=0)
    mean = (part * pace).sum(axis=0)
    spread = np.sqrt(((part * pace * deviation) ** 2).sum(axis=0))
    return _above((bound_s - mean) / np.maximum(1e-12, spread))


def _late(instance: InstanceModel, states: Sequence[StageState], cuts: Array, prompts: Array, bound_s: float) -> Array:
    """Share of each path's requests whose first token comes too late."""
    at, curves = np.searchsorted(cuts, prompts, side="right") - 1, instance.step_curves()
    found = np.zeros_like(prompts)
    for index, state in enumerate(states):
        here = at == index
        own = prompts[here] * curves.prompt(state.sequences, prompts[here])
        own = own + np.ceil(prompts[here] / _CHUNK) * state.pace_s * state.free
        spare = np.maximum(0.0, bound_s - own)
        behind = state.waits * np.exp(-spare / max(1e-9, state.wait_s))
        found[here] = np.where(own > bound_s, 1.0, 1 - (1 - behind) * (1 - state.full))
    return found


def _alone_s(statistics: LengthStatistics, instance: InstanceModel) -> float:
    """Seconds per token of one sequence of mean context."""
    context = float(statistics.context_tokens.sum()) / max(1.0, float(statistics.decode_tokens.sum()))
    return float(instance.step_curves().step(np.asarray([1.0]))[0]) + instance.per_context_token_s * context


def _middle(bins: npt.NDArray[np.intp]) -> Array:
    """Geometric middle of bins, tokens."""
    edges = np.asarray([*EDGES, EDGES[-1] * 2], dtype=np.float64)
    low, high = edges[bins], edges[bins + 1]
    found: Array = np.where(low > 0, np.sqrt(np.maximum(1.0, low) * high), high / 2)
    return found


def _above(deviations: Array) -> Array:
    """Upper tail of the normal distribution."""
    return np.asarray([0.5 * math.erfc(float(each) / math.sqrt(2)) for each in deviations])
