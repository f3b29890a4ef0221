"""Histograms that actors count into."""

import pytest
from millrace.actor.histograms import Histogram, LatencyHistogram


def test_a_histogram_counts_each_observation_once_and_cumulates() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert histogram.buckets() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert histogram.count == 4
    assert histogram.sum == pytest.approx(7.65)


def test_a_latency_histogram_counts_nanoseconds_and_tells_seconds() -> None:
    histogram = LatencyHistogram((0.001, 0.5))
    for duration_ns in (999_999, 1_000_000, 1_000_001, 500_000_000, 2_000_000_000):
        histogram.observe(duration_ns)
    assert histogram.buckets() == [("0.001", 2.0), ("0.5", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == pytest.approx(2.503)
    assert histogram.mean_ns == pytest.approx(2.503e9 / 5)
    assert LatencyHistogram((1.0,)).mean_ns == 0
