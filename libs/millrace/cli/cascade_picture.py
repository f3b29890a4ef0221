"""The front of a cascade as a picture: quality against latency."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from millrace.cascade.jobs import PlanningJob, PlanningResult

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_front(result: PlanningResult, path: Path, *, target: PlanningJob) -> None:
    """Writes the PNG: the front with the lower bounds of quality, what was chosen, and what was asked for."""
    figure, axes = pyplot.subplots(figsize=(9, 5.5), constrained_layout=True)
    latencies = [point.p95_s for point in result.front]
    axes.plot(
        latencies, [point.quality for point in result.front], "o-", label="front: best for any instances (of each tier)"
    )
    lows = [point.quality_low for point in result.front]
    axes.plot(latencies, lows, ".:", color="grey", label="lower 95 % bound")
    for point in result.front:
        label = "/".join(map(str, point.instances))
        axes.annotate(label, (point.p95_s, point.quality), fontsize=7, xytext=(4, -9), textcoords="offset points")
    if result.chosen is not None:
        axes.plot(
            result.chosen.p95_s,
            result.chosen.quality,
            "*",
            markersize=15,
            color="#d62728",
            label="chosen for the present instances",
        )
    if target.quality is not None:
        axes.axhline(target.quality, color="black", linewidth=0.8, label="quality asked for")
    if target.latency_s is not None:
        axes.axvline(target.latency_s, color="black", linewidth=0.8, label="p95 asked for")
    tiers = ", ".join(tier.model for tier in target.tiers)
    axes.set(xlabel="p95 of requests, s", ylabel="mean quality", title=f"{tiers}; {target.rate:g} requests/s")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
