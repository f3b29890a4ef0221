"""Training samples: a request's features with the length that its answer had."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.lengths.estimate import LENGTH_MAX
from millrace.lengths.features import FEATURES

#: Choices of one request that count: many choices of one prompt must not drown the others.
CHOICES_MAX = 4
#: How an output may end for its length to be learnt.
ENDED, CUT = "stop", "length"


class LengthSample(msgspec.Struct, frozen=True, array_like=True):
    """One outcome.

    Attributes:
        row: Features as they were when the request came, little-endian float32.
        lengths: Real output lengths, tokens: one per choice, at most CHOICES_MAX.
        cut: Whether ``max_tokens`` ended any of them.
        key, opening, template: What history needs to learn from it again after a restart.
        at_ns: When it ended, unix ns; 0 where unknown.
    """

    row: bytes
    lengths: list[int]
    cut: bool
    key: str
    opening: int
    template: int
    at_ns: int = 0


def usable_lengths(lengths: Iterable[int], reasons: Sequence[str]) -> tuple[list[int], bool]:
    """Lengths that can be learnt from, and whether one was cut; none where any choice ended otherwise or absurdly."""
    kept = list(lengths)[:CHOICES_MAX]
    ended = list(reasons)[:CHOICES_MAX] or [ENDED] * len(kept)
    if not all(0 < length <= LENGTH_MAX for length in kept) or not set(ended) <= {ENDED, CUT}:
        return [], False
    return kept, CUT in ended


def pack(row: NDArray[np.float64]) -> bytes:
    """A row as a sample keeps it."""
    return row.astype("<f4").tobytes()


def matrix(samples: Sequence[LengthSample]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Features (choices, FEATURES) and lengths (choices) of samples, in order; those of other features are left out."""
    size = 4 * len(FEATURES)
    fitting = [sample for sample in samples if len(sample.row) == size]
    if not fitting:
        return np.empty((0, len(FEATURES))), np.empty(0)
    rows = np.frombuffer(b"".join(sample.row for sample in fitting), "<f4").reshape(-1, len(FEATURES))
    counts = [len(sample.lengths) for sample in fitting]
    lengths = np.array([length for sample in fitting for length in sample.lengths], np.float64)
    return np.repeat(rows.astype(np.float64), counts, axis=0), lengths
