"""Drift of a cascade's traffic: what is found, and how often nothing is mistaken for something."""

from __future__ import annotations

import numpy as np

from papers.cascadia.drift import DriftKind, DriftSettings, TrafficWindow, detect_drift

BINS, PER_BIN = 30, 20


def _window(rng: np.random.Generator, *, per_bin: float = PER_BIN, longer: float = 1.0, scores: float = 60.0):
    counts = rng.poisson(per_bin, BINS)
    count = int(counts.sum())
    return TrafficWindow(
        counts=counts.tolist(),
        prompt_tokens=np.exp(rng.normal(6, 1, count) + np.log(longer)),
        output_tokens=np.exp(rng.normal(5, 0.7, count)),
        scores=(np.clip(rng.normal(scores, 20, count), 0, 100).round(),),
    )


def _kinds(before: TrafficWindow, after: TrafficWindow) -> set[DriftKind]:
    return {found.kind for found in detect_drift(before, after)}


def test_a_change_of_each_kind_is_found_and_named():
    rng = np.random.default_rng(0)
    before = _window(rng)
    assert _kinds(before, _window(rng, per_bin=1.5 * PER_BIN)) == {DriftKind.RATE}
    assert _kinds(before, _window(rng, per_bin=0.6 * PER_BIN)) == {DriftKind.RATE}
    assert _kinds(before, _window(rng, longer=1.6)) == {DriftKind.PROMPT_TOKENS}
    assert _kinds(before, _window(rng, scores=45)) == {DriftKind.SCORES}


def test_stationary_traffic_raises_at_most_one_alarm_a_day():
    rng = np.random.default_rng(1)
    before = _window(rng)
    checks = 1440  # a day of checks each minute, all against the same planned window
    alarms = sum(bool(detect_drift(before, _window(rng))) for _ in range(checks))
    assert alarms <= 1


def test_bursty_but_stationary_arrivals_raise_at_most_one_alarm_a_day():
    rng = np.random.default_rng(2)

    def bursty() -> TrafficWindow:
        counts = rng.poisson(rng.gamma(2.0, PER_BIN / 2.0, BINS))
        return TrafficWindow(counts=counts.tolist(), prompt_tokens=np.empty(0), output_tokens=np.empty(0))

    before = bursty()
    assert sum(bool(detect_drift(before, bursty())) for _ in range(1440)) <= 1


def test_a_small_change_is_none_however_sure_it_is():
    rng = np.random.default_rng(3)
    before, after = (rng.normal(mean, 1, 200_000) for mean in (100.0, 100.05))
    window = TrafficWindow(counts=[1000] * BINS, prompt_tokens=before, output_tokens=before)
    moved = TrafficWindow(counts=[1100] * BINS, prompt_tokens=after, output_tokens=before)
    assert detect_drift(window, moved) == ()
    eager = DriftSettings(rate_change=0.0, distance=0.0)
    assert {found.kind for found in detect_drift(window, moved, eager)} == {DriftKind.RATE, DriftKind.PROMPT_TOKENS}


def test_windows_that_say_too_little_are_not_compared():
    few = TrafficWindow(counts=[1, 2], prompt_tokens=np.arange(1, 5), output_tokens=np.arange(1, 5))
    many = TrafficWindow(counts=[500] * BINS, prompt_tokens=np.full(99, 9000), output_tokens=np.full(99, 9000))
    assert detect_drift(few, many) == ()
