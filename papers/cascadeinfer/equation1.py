"""Equation 1, the paper's linear model of normalised latency, and the objective of its planner.

Source: CascadeInfer, sections 4.1 and 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from millrace.policies.stages.objectives import StageCosts
from millrace.policies.stages.paces import LengthSums, ratio
from millrace.policies.stages.statistics import BINS, EDGES, LengthStatistics

#: The paper's resident set at a load beyond what the cluster can serve is that of this utilisation.
_UTILISATION_MAX = 0.95


class QualityModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of ``Q = D0 + D1·n + D2·ΣI + D3·ΣI² + D4·ΣL``, seconds per output token of each request in a batch.

    n is the number of requests in the batch, I their prompt lengths and L their present lengths, tokens. The quality of
    the whole batch is ``n·Q``; lower is better.

    Attributes:
        d0: Seconds.
        d1: Seconds per request.
        d2: Seconds per prompt token.
        d3: Seconds per squared prompt token.
        d4: Seconds per token of present length.
    """

    d0: float
    d1: float = 0.0
    d2: float = 0.0
    d3: float = 0.0
    d4: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for coefficients that are negative or not finite."""
        for name in ("d0", "d1", "d2", "d3", "d4"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0 and finite, is {value}")

    def batch(self, n: float, lengths_sum: float, *, instances: int = 1) -> float:
        """Quality of n requests that several instances share evenly, prompts left out: ``n·(D0 + (D1·n + D4·ΣL)/e)``.

        Args:
            n: Requests of all instances together.
            lengths_sum: Sum of their present lengths, tokens.
            instances: e, at least 1.
        """
        return n * (self.d0 + (self.d1 * n + self.d4 * lengths_sum) / instances)


def quality_costs(
    statistics: LengthStatistics,
    quality: QualityModel,
    edges: Sequence[int],
    instances: int,
    *,
    transfer_s_per_token: float = 0.0,
) -> StageCosts:
    """The paper's objective: sum over stages of ``d · Q`` of an even part of the stage's resident requests.

    The resident set is the one that one stage over all lengths would hold. The paper adds the time to transfer what
    crosses a cut, which is seconds, to qualities, which are seconds per token. Here the time to transfer each request
    that crosses is divided by the mean output length, so that both are sums of normalised latency.

    Source: CascadeInfer, section 4.2.
    """
    sums = LengthSums(statistics, edges, instances)
    per_second = 1.0 / (statistics.span_s or 1.0)
    step = _resident_pace(statistics, quality, instances) * per_second
    n = sums.of(statistics.decode_tokens * step)
    rest = (
        quality.d1 * n
        + quality.d2 * sums.of(statistics.prompt_tokens * step)
        + quality.d3 * sums.of(statistics.prompt_tokens_squared * step)
        + quality.d4 * sums.of(statistics.context_tokens * step)
    )
    pace = quality.d0 + rest[:, :, None] / sums.instances
    resident = float(n[0, -1])
    crossing = [statistics.crossing(edge) / max(1.0, statistics.requests) for edge in edges]
    lengths = [_length(edge) for edge in edges]
    per_token = transfer_s_per_token / max(1.0, statistics.output_tokens_mean)
    cut = [resident * share * length * per_token for share, length in zip(crossing, lengths, strict=True)]
    return StageCosts(
        edges=tuple(edges),
        cost=np.where(sums.valid, n[:, :, None] * pace, np.inf),
        pace_s=pace,
        cut=np.asarray(cut),
        sequences=n[:, :, None] / sums.instances,
        context=ratio(sums.of(statistics.context_tokens), sums.of(statistics.decode_tokens)),
    )


def _length(edge: int) -> float:
    return float(EDGES[edge]) if edge < BINS else float(EDGES[-1])


def _resident_pace(statistics: LengthStatistics, quality: QualityModel, instances: int) -> float:
    """Time per token of one stage over all lengths by equation 1, with the resident set that follows from it."""
    used = (
        quality.d1 * statistics.decode_tokens.sum()
        + quality.d2 * statistics.prompt_tokens.sum()
        + quality.d3 * statistics.prompt_tokens_squared.sum()
        + quality.d4 * statistics.context_tokens.sum()
    )
    utilisation = float(used) / (statistics.span_s or 1.0) / max(1, instances)
    return quality.d0 / (1 - min(utilisation, _UTILISATION_MAX))
