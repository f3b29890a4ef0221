"""The published scalar objectives of routing.

Source: Cascadia, section 3.3 (quality-constrained) and appendix C (latency-constrained).
"""

from __future__ import annotations


def latency_quality_score(
    latency_s: float, quality: float, *, quality_min: float, utopia: float, nadir: float, weight: float
) -> float:
    """J = L + weight · max(0, quality_min − Q) / (utopia − nadir); smaller is better.

    Args:
        utopia: Quality with every request on the largest model.
        nadir: Quality with every request on the smallest.
        weight: μ of the paper.

    Where ``utopia <= nadir`` (the paper divides by zero there: the largest model is not the best on this sample) the
    shortfall counts in points of quality.
    """
    scale = utopia - nadir if utopia > nadir else 1.0
    return latency_s + weight * max(0.0, quality_min - quality) / scale


def quality_latency_score(
    latency_s: float, quality: float, *, latency_max_s: float, slowest_s: float, fastest_s: float, weight: float
) -> float:
    """−Q + weight · max(0, L − latency_max) / (slowest − fastest); smaller is better.

    Args:
        slowest_s, fastest_s: Worst and best latency that can be reached; equal ones count seconds.
        weight: ν of the paper.
    """
    scale = slowest_s - fastest_s if slowest_s > fastest_s else 1.0
    return -quality + weight * max(0.0, latency_s - latency_max_s) / scale
