"""Length statistics of requests: how many tokens are decoded at which context length.

Lengths fall into logarithmic bins, four per octave; cuts between stages lie on their edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Bins per octave: neighbouring edges are 19 percent apart.
PER_OCTAVE = 4

#: The first bin is [0, EDGE_MIN), the last one [EDGE_MAX, inf), tokens.
EDGE_MIN, EDGE_MAX = 32, 1 << 20


def _edges() -> list[int]:
    octaves = EDGE_MAX.bit_length() - EDGE_MIN.bit_length()
    return [0, *(round(EDGE_MIN * 2 ** (k / PER_OCTAVE)) for k in range(octaves * PER_OCTAVE + 1))]


#: First length of each bin, tokens.
EDGES: tuple[int, ...] = tuple(_edges())
BINS = len(EDGES)

#: The last bin ends here where a bound is needed.
_END = EDGE_MAX * 16


@dataclass(frozen=True, kw_only=True)
class LengthStatistics:
    """Sums over the requests of a period; arrays have one entry per bin of EDGES.

    Attributes:
        requests: Sequences that began in it.
        paths: (BINS, BINS). Sequences by bin of prompt length and bin of final length.
        decode_tokens: Output tokens by context length at which they were decoded.
        context_tokens: Sum of those context lengths.
        weight: Share of each sequence's output tokens in the bin, summed over sequences.
        prompt_tokens: Sum of the prompt lengths of those who decoded the output tokens.
        prompt_tokens_squared: Sum of their squares.
        prefill_tokens: Prompt tokens computed (cached ones left out), by prompt length.
        prefill_work: Their attention work, chunk * (cached + chunk / 2), tokens squared.
    """

    span_s: float
    requests: float
    paths: Array
    decode_tokens: Array
    context_tokens: Array
    weight: Array
    prompt_tokens: Array
    prompt_tokens_squared: Array
    prefill_tokens: Array
    prefill_work: Array

    @property
    def requests_per_s(self) -> float:
        """Mean rate; 0 for an empty period."""
        return self.requests / self.span_s if self.span_s > 0 else 0.0

    @property
    def output_tokens_mean(self) -> float:
        """Mean output length, tokens; 0 without requests."""
        return float(self.decode_tokens.sum()) / self.requests if self.requests else 0.0

    def crossing(self, bin_index: int) -> float:
        """Sequences that begin below an edge and grow past it."""
        return float(self.paths[:bin_index, bin_index:].sum())


def statistics_of(
    prompts: Sequence[int], outputs: Sequence[int], *, span_s: float, cached: Sequence[int] | None = None
) -> LengthStatistics:
    """Statistics of finished sequences.

    Args:
        outputs: Output lengths, tokens; those without output are left out.
        span_s: Length of the period in which they arrived, seconds.
        cached: Prompt tokens that were found in a prefix cache; None for none.
    """
    kept = np.asarray(outputs, dtype=np.float64) > 0
    prompt = np.asarray(prompts, dtype=np.float64)[kept]
    output = np.asarray(outputs, dtype=np.float64)[kept]
    found = np.zeros_like(prompt) if cached is None else np.minimum(np.asarray(cached, np.float64)[kept], prompt)
    tokens, contexts = _decoded(prompt, output)
    start, end = _bins(prompt), _bins(prompt + output)
    computed = prompt - found
    paths = np.zeros((BINS, BINS))
    np.add.at(paths, (start, end), 1.0)
    return LengthStatistics(
        span_s=span_s,
        requests=float(len(prompt)),
        paths=paths,
        decode_tokens=tokens.sum(axis=0),
        context_tokens=contexts.sum(axis=0),
        weight=(tokens / output[:, None]).sum(axis=0),
        prompt_tokens=(tokens * prompt[:, None]).sum(axis=0),
        prompt_tokens_squared=(tokens * prompt[:, None] ** 2).sum(axis=0),
        prefill_tokens=_by_bin(start, computed),
        prefill_work=_by_bin(start, computed * (found + computed / 2)),
    )


def _decoded(prompt: Array, output: Array) -> tuple[Array, Array]:
    """(N, BINS) each: tokens decoded per bin, and the sum of the contexts at which they were decoded."""
    edges = np.asarray([*EDGES, _END], dtype=np.float64)
    low = np.clip(edges[None, :-1], prompt[:, None], (prompt + output)[:, None])
    high = np.clip(edges[None, 1:], prompt[:, None], (prompt + output)[:, None])
    tokens = high - low
    return tokens, tokens * (low + high) / 2


def _by_bin(bins: npt.NDArray[np.intp], values: Array) -> Array:
    return np.bincount(bins, weights=values, minlength=BINS).astype(np.float64)


def _bins(lengths: Array) -> npt.NDArray[np.intp]:
    found: npt.NDArray[np.intp] = np.searchsorted(np.asarray(EDGES, dtype=np.float64), lengths, side="right") - 1
    return found
