"""Variation between equal steps: the error that no step-time model can avoid, however good.

The time of the same batch varies with the machine's other work and its host's other guests. Passes over the same
rounds measure by how much: each step of a pass is compared with the median of the same step in the others. That median
is about the best prediction of a step without knowing when it runs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from millrace.profiling.records import RoundRecord

Times = npt.NDArray[np.float64]


def times(repeats: list[list[RoundRecord]], *, cpu: bool) -> Times:
    """Times of all steps, ns, a row for each pass; ``repeats`` holds each round's, whose steps are the same."""
    passes = zip(*repeats, strict=True)
    rows = [[step.cpu_ns if cpu else step.wall_ns for record in records for step in record.steps] for records in passes]
    return np.array(rows, dtype=np.float64)


def sums(steps: Times, size: int) -> Times:
    """Of each ``size`` steps in a row; those left over at the end are left out."""
    whole = steps.shape[-1] // size * size
    return np.asarray(steps[..., :whole].reshape(*steps.shape[:-1], -1, size).sum(axis=-1))


def spread(steps: Times) -> float:
    """Mean absolute relative error of the median of the other passes: the least that a model's can be.

    Args:
        steps: A row for each pass, at least two.
    """
    errors = [np.median(np.delete(steps, row, 0), axis=0) / steps[row] - 1.0 for row in range(len(steps))]
    return float(np.abs(errors).mean())


def error(told: Times, steps: Times) -> float:
    """Mean absolute relative error of what a model says of each step."""
    return float(np.abs(told / steps - 1.0).mean())
