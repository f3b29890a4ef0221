"""Probability that an instance's running sequences need more KV blocks than there are, at points of time to come.

Each sequence goes on with a probability that falls as it generates, by its predicted quantiles of the rest, and holds
more blocks the longer it goes on. Blocks are summed as if independent and normal: with some ten sequences or more the
sum is near enough to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.contracts.kv import KvGroup
from millrace.contracts.status import SequenceStatus, StatusSnapshot

Numbers = NDArray[np.float64]

#: Points of the horizon.
POINTS = 16
#: Logarithms of the quantiles are at least this far apart: a rest is never known to the token.
SPREAD_MIN = 0.05
_LOG_9 = math.log(9.0)


def memory_risk(
    snapshot: StatusSnapshot,
    *,
    block_size: int,
    horizon_tokens: int,
    groups: Sequence[KvGroup] = (),
    points: int = POINTS,
    reserved_blocks: int = 0,
) -> float:
    """Probability that an instance's blocks do not suffice at some point of ``horizon_tokens`` further tokens each.

    It is the highest one at equal steps up to there.

    Waiting sequences are not counted: an engine lets them in only where blocks are free. A sequence of which nothing is
    predicted is taken to go on to its bound.

    Args:
        horizon_tokens: At least 1; what a sequence generates in three times a move's duration, for example.
        groups: Of layers, each with blocks of its own; none for one that keeps all.
        reserved_blocks: Promised to sequences that are to come.

    Raises:
        ValueError: a size is not positive.
    """
    if block_size < 1 or horizon_tokens < 1 or points < 1:
        raise ValueError(
            f"block_size {block_size}, horizon_tokens {horizon_tokens} and points {points} must be positive"
        )
    ahead = np.unique(np.ceil(np.linspace(horizon_tokens / points, horizon_tokens, points)))
    running = snapshot.running
    held = sum(entry.blocks for entry in running)
    others = max(0, snapshot.blocks_total - snapshot.blocks_free - held) + reserved_blocks
    alive = _alive(running, ahead)
    lengths = np.array([entry.prompt_tokens + entry.output_tokens for entry in running], np.float64)
    tokens = lengths[:, None] + ahead
    sizes = [(group.block_tokens, float(group.blocks_max)) for group in groups] or [(block_size, math.inf)]
    blocks = np.sum([np.minimum(np.ceil(tokens / size), most) for size, most in sizes], axis=0)
    mean = others + (alive * blocks).sum(axis=0)
    variance = (alive * (1.0 - alive) * blocks**2).sum(axis=0)
    pairs = zip(mean.tolist(), variance.tolist(), strict=True)
    return max(_above(snapshot.blocks_total, middle, spread) for middle, spread in pairs)


def _alive(running: Sequence[SequenceStatus], ahead: Numbers) -> Numbers:
    """Probability that each sequence generates more than so many further tokens, (sequences, points).

    The rest is log-logistic through both quantiles, from the moment of the estimate on, given what came since.
    """
    known = [_estimate(entry) for entry in running]
    since, scale, shape = (np.array(column, np.float64)[:, None] for column in zip(*known, strict=True)) if known else (
        np.empty((0, 1)) for _ in range(3)
    )  # fmt: skip
    gone = _survival(since, scale, shape)
    left = np.array([entry.max_tokens - entry.output_tokens for entry in running], np.float64)[:, None]
    return np.where(ahead < left, _survival(since + ahead, scale, shape) / gone, 0.0)


def _estimate(entry: SequenceStatus) -> tuple[float, float, float]:
    """Tokens since the estimate, and scale and shape of the rest's distribution then; shape 0 never ends."""
    at, expected, p90 = entry.expected_at, entry.expected_output_tokens, entry.expected_p90
    if at is None or expected is None or p90 is None or not at < expected <= p90:
        return 0.0, 1.0, 0.0
    scale = 1.0 + expected - at
    spread = max(SPREAD_MIN, math.log1p(p90 - at) - math.log(scale))
    return float(max(0, entry.output_tokens - at)), scale, _LOG_9 / spread


def _survival(tokens: Numbers, scale: Numbers, shape: Numbers) -> Numbers:
    """Log-logistic: one half at the median, a tenth at the 90th percentile; 1 where ``shape`` is 0."""
    odds = np.exp(np.minimum(shape * np.log((1.0 + tokens) / scale), 700.0))
    return np.where(shape > 0, 1.0 / (1.0 + odds), 1.0)


def _above(capacity: int, mean: float, variance: float) -> float:
    """Probability that a normal sum exceeds a whole number of blocks."""
    if variance <= 0:
        return 1.0 if mean > capacity else 0.0
    return 0.5 * math.erfc((capacity + 0.5 - mean) / math.sqrt(2.0 * variance))
