"""Time per token and running sequences of every stage and number of instances, by Little's law.

For a number of sequences n the instances that it takes follow in closed form: with the step ``b(n)``, the decoded
tokens ``v`` and the prefill time ``s(n)`` per second, ``n = (v/d)·b/(1 − s/d)`` gives ``d = s + v·b/n``. So d is
computed on a grid of n, and n at each d is read off. Among several solutions the smallest n counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millrace.policies.stages.instance import InstanceModel
from millrace.policies.stages.statistics import EDGES, Array, LengthStatistics

#: Grid points per factor of e in the number of sequences, from 1/8 on.
_POINTS = 12

#: Ends of the grid: fewer sequences change no step, and no engine runs more.
_FEWEST, _FEW, _MOST = 1e-9, 1 / 8, 8192.0

#: Least slope: a stage that decodes hardly faster with more sequences has no steady state to speak of.
_FLAT = 1e-3


def open_paces(
    statistics: LengthStatistics, instance: InstanceModel, edges: Sequence[int], instances: int
) -> tuple[Array, Array, Array]:
    """(J + 1, J + 1, E + 1) each: seconds per token, sequences per instance, and their relative standard deviation.

    ``inf`` where there is no such state. The bound of the batch is not applied here: up to four times as many sequences
    have a pace. The deviation is that of a processor-sharing queue whose instances are level: the rate at which the
    stage decodes rises by the share ``slope`` of what the number of sequences rises by, and the variance of their
    number is arrivals over that.

    Args:
        edges: Candidate cuts, as indices into EDGES.
    """
    sums, n = LengthSums(statistics, edges, instances), _grid(instance)
    decoded = sums.of(statistics.decode_tokens) / (statistics.span_s or 1.0)
    step = step_s(statistics, instance, edges, n)
    prefill = prefill_s_per_s(statistics, instance, sums, n)
    counts, falling = np.arange(1, instances + 1, dtype=np.float64), np.log(n[::-1])
    asked, steps = np.log(counts), -np.diff(falling)
    shape = (len(edges), len(edges), instances + 1)
    pace, sequences, deviation = np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, np.inf)
    for i, j in zip(*np.triu_indices(len(edges), 1), strict=True):
        if decoded[i, j] <= 0:
            spare = 1.0 - prefill[i, j, 0] / counts
            pace[i, j, 1:] = np.divide(step[i, j, 0], spare, out=np.full_like(spare, np.inf), where=spare > 0)
            sequences[i, j, 1:] = deviation[i, j, 1:] = np.where(spare > 0, 0.0, np.inf)
            continue
        needed = np.minimum.accumulate(prefill[i, j] + decoded[i, j] * step[i, j] / n)
        known = np.log(needed[::-1])
        found = np.exp(np.interp(asked, known, falling))
        sequences[i, j, 1:] = np.where(counts >= needed[-1], found, np.inf)
        pace[i, j, 1:] = sequences[i, j, 1:] * counts / decoded[i, j]
        slope = np.maximum(_FLAT, np.interp(asked, (known[1:] + known[:-1]) / 2, np.diff(known) / steps))
        free = 1.0 - np.interp(asked, known, prefill[i, j, ::-1]) / counts
        deviation[i, j, 1:] = np.sqrt(np.maximum(0.0, free) / (counts * np.maximum(_FEW, found) * slope))
    return pace, sequences, deviation


def _grid(instance: InstanceModel) -> Array:
    most = min(_MOST, 4 * instance.max_sequences)
    return np.concatenate([[_FEWEST], np.geomspace(_FEW, most, round(_POINTS * np.log(most / _FEW)))])


def step_s(statistics: LengthStatistics, instance: InstanceModel, edges: Sequence[int], n: Array) -> Array:
    """(J + 1, J + 1, G): seconds of a step in which 1 + n sequences decode."""
    sums = LengthSums(statistics, edges, 1)
    context = ratio(sums.of(statistics.context_tokens), sums.of(statistics.decode_tokens))[:, :, None]
    step: Array = instance.step_curves().step(1 + n) + instance.per_context_token_s * context * (1 + n)
    if instance.tail_s > 0:
        over = np.maximum(0.0, LongestOf(statistics, edges).expected(n) - context)
        step = step + np.where(n + 1 >= instance.tail_decodes_min, instance.tail_s * over, 0.0)
    return step


def prefill_s_per_s(statistics: LengthStatistics, instance: InstanceModel, sums: LengthSums, n: Array) -> Array:
    """(J + 1, J + 1, G): seconds per second that prompts take, beside n decoding sequences.

    A bin's prompts count as alike; what their attention costs beyond that is added.
    """
    began = statistics.paths.sum(axis=1)
    mean = ratio(statistics.prefill_tokens, began)
    uneven = np.maximum(0.0, statistics.prefill_work - began * mean**2 / 2) * instance.per_prefill_work_s
    curves, span_s = instance.step_curves(), statistics.span_s or 1.0
    each = [sums.of(statistics.prefill_tokens * curves.prompt(float(count), mean) + uneven) for count in n]
    return np.stack(each, axis=-1) / span_s


class LengthSums:
    """Sums of per-bin figures over each pair of cuts, by differences of running sums."""

    def __init__(self, statistics: LengthStatistics, edges: Sequence[int], instances: int) -> None:
        self._edges = np.asarray(edges)
        below = np.arange(len(edges))
        counts = np.arange(instances + 1)
        self.valid: npt.NDArray[np.bool_] = (below[:, None] < below[None, :])[:, :, None] & (counts > 0)
        self.instances = np.maximum(1, counts)[None, None, :].astype(np.float64)

    def of(self, values: Array) -> Array:
        """(J + 1, J + 1): sum over the bins between cut i and cut j; 0 where j is not above i."""
        running = np.concatenate([[0.0], np.cumsum(values)])[self._edges]
        found: Array = np.maximum(0.0, running[None, :] - running[:, None])
        return found


class LongestOf:
    """Expected longest of n sequences of a stage: the length below which the share n / (n + 1) of them lies."""

    def __init__(self, statistics: LengthStatistics, edges: Sequence[int]) -> None:
        counts = statistics.decode_tokens + 1e-9  # resident sequences are in proportion to tokens decoded
        self._running = np.concatenate([[0.0], np.cumsum(counts)])
        self._lengths = np.asarray([*EDGES, EDGES[-1] * 16], dtype=np.float64)
        at = self._running[np.asarray(edges)]
        self._low, self._width = at[:, None, None], (at[None, :] - at[:, None])[:, :, None]

    def expected(self, n: Array) -> Array:
        """(J + 1, J + 1, G) lengths for G numbers of sequences."""
        wanted = self._low + np.maximum(0.0, self._width) * ((n + 1) / (n + 2))
        found: Array = np.interp(wanted, self._running, self._lengths)
        return found


def ratio(above: Array, below: Array) -> Array:
    """Quotient; 0 where the divisor is not above 0."""
    found: Array = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    return found
