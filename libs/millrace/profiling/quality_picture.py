"""A quality profile as a picture: model against measurement, and the error by length bucket."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from millrace.profiling.quality import QualityProfile, predicted_s

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_quality(profile: QualityProfile, path: Path) -> None:
    """Writes the PNG."""
    figure, (against, by_bucket) = pyplot.subplots(1, 2, figsize=(13, 5.5), constrained_layout=True)
    figure.suptitle(f"{profile.profiled.model}; {profile.profiled.hardware}\n{profile.said()}", fontsize=10)
    measured = [record.normalised_latency_ns / 1e6 for record in profile.judged]
    said = [predicted_s(profile.coefficients, record) * 1e3 for record in profile.judged]
    against.scatter(measured, said, s=10, alpha=0.5)
    ends = [min(measured), max(measured)]
    against.plot(ends, ends, color="black", linewidth=0.8)
    against.set(
        xscale="log", yscale="log", xlabel="measured, ms per output token", ylabel="equation 1, ms per output token"
    )
    positions = range(len(profile.buckets))
    by_bucket.bar([x - 0.2 for x in positions], [100 * each.error for each in profile.buckets], 0.4, label="equation 1")
    static = [100 * each.static_error for each in profile.buckets]
    by_bucket.bar([x + 0.2 for x in positions], static, 0.4, label="global mean")
    labels = [f"{each.length_min}-{2 * each.length_min}" for each in profile.buckets]
    by_bucket.set_xticks(list(positions), labels)
    by_bucket.set(xlabel="tokens, prompt plus output", ylabel="mean absolute error, %")
    by_bucket.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
