"""Histograms that actors count into."""

import pytest
from millrace.actor.histograms import LatencyHistogram


def test_a_latency_histogram_counts_nanoseconds_and_tells_seconds() -> None:
    histogram = LatencyHistogram((0.001, 0.5))
    for duration_ns in (999_999, 1_000_000, 1_000_001, 500_000_000, 2_000_000_000):
        histogram.observe(duration_ns)
    assert histogram.buckets() == [("0.001", 2.0), ("0.5", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == pytest.approx(2.503)
    assert histogram.mean_ns == pytest.approx(2.503e9 / 5)
    assert LatencyHistogram((1.0,)).mean_ns == 0
