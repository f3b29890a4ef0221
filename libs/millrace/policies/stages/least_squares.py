"""Least squares with coefficients of at least 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def nonnegative(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Coefficients with the least relative error; those that would be negative are left out, the worst one first.

    Args:
        rows: (N, K) features.
        targets: (N) positive figures.
    """
    target = np.asarray(targets, dtype=np.float64)
    matrix = np.asarray(rows, dtype=np.float64) / np.maximum(target, 1e-12)[:, None]
    scale = np.maximum(np.abs(matrix).mean(axis=0), 1e-300)
    found = [0.0] * matrix.shape[1]
    free = list(range(matrix.shape[1]))
    while free:
        solution, *_ = np.linalg.lstsq(matrix[:, free] / scale[free], np.ones(len(target)), rcond=None)
        if (solution >= 0).all():
            for index, value in zip(free, solution / scale[free], strict=True):
                found[index] = float(value)
            break
        free.pop(int(np.argmin(solution)))
    return found
