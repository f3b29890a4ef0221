"""Boundary of one instance as the paper finds it: least equation 1 over all splits of its own and averaged successors.

Source: CascadeInfer, section 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from papers.cascadeinfer.equation1 import QualityModel

#: Fewer sequences move no boundary.
SEQUENCES_MIN = 5


def divide(lengths: Sequence[int], parts: int) -> list[int]:
    """Picks the set of one of ``parts`` instances: sorted, from the parts/2-th on every parts-th.

    Source: CascadeInfer, footnote 1.
    """
    return sorted(lengths)[parts // 2 :: parts]


def paper_boundary(own: Sequence[int], successors: Sequence[int], instances: int, quality: QualityModel) -> int | None:
    """Boundary of one instance as the paper finds it, before smoothing; None below five sequences.

    Args:
        own: Lengths at this instance, tokens.
        successors: Lengths at all instances of the next stage.
        instances: Of the next stage, at least 1.

    Source: CascadeInfer, section 4.3.
    """
    lengths = sorted([*own, *divide(successors, instances)])
    if len(lengths) < SEQUENCES_MIN:
        return None
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    n, whole = len(lengths), sums[-1]
    costs = [quality.batch(i, sums[i]) + quality.batch(n - i, whole - sums[i]) for i in range(n)]
    return lengths[costs.index(min(costs))]
