"""Pairs of policies in both worlds, and unequal engines: their settings, their load, their replay."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from millrace.enginemodel.registered import scheduler_parameters

from bench.live import unequal
from bench.live.pairs import Difference, Key, Pair, Verdict, differences, pair_lines, pairs
from bench.live.recording import Figures
from services.worker.config import WorkerConfig
from services.worker.modelled import modelled_parameters


def figure(request: str, *, at_s: float, e2e_s: float) -> Figures:
    return Figures(
        request=request,
        arrival_s=at_s,
        prompt_tokens=5,
        output_tokens=10,
        ttft_s=e2e_s / 10,
        e2e_s=e2e_s,
        placing_s=0.0,
        instance="w0",
    )


def world(added_s: float, *, noise_s: float, seed: int, count: int = 200) -> dict[Key, Figures]:
    """Requests whose own times differ a hundredfold, alike in all policies, and what a policy adds to them."""
    own, rng = Random(1), Random(seed)
    times = [own.uniform(0.1, 10.0) + added_s + rng.gauss(0.0, noise_s) for _ in range(count)]
    return {(0, n): figure(str(n), at_s=n / 5, e2e_s=time_s) for n, time_s in enumerate(times)}


def difference(low: float, high: float) -> Difference:
    return Difference(value=(low + high) / 2, low=low, high=high)


def test_a_small_delay_is_told_apart_though_requests_differ_much_more_among_themselves() -> None:
    one, other = world(0.0, noise_s=0.1, seed=2), world(0.1, noise_s=0.1, seed=3)
    told = differences(one, other, sorted(one), "e2e")["mean"]
    assert told.value == pytest.approx(-0.1, abs=0.03)
    assert told.low < told.value < told.high < 0
    assert told.sign == -1


def test_requests_of_one_burst_count_as_one_observation() -> None:
    """The same differences are less sure where whole slices share them."""
    rng = Random(7)
    shared = [rng.gauss(0.0, 1.0) for _ in range(20)]
    at_once = {(0, n): figure(str(n), at_s=n / 5, e2e_s=5.0 + shared[n // 10]) for n in range(200)}
    apart = {(0, n): figure(str(n), at_s=2.0 * n, e2e_s=5.0 + shared[n // 10]) for n in range(200)}
    level = {(0, n): figure(str(n), at_s=n / 5, e2e_s=5.0) for n in range(200)}
    widths = [differences(each, level, sorted(level), "e2e")["mean"] for each in (at_once, apart)]
    assert widths[0].high - widths[0].low > 2 * (widths[1].high - widths[1].low)


@pytest.mark.parametrize(
    ("live", "modelled", "verdict"),
    [
        ((-2, -1), (-3, -1), Verdict.SAME),
        ((1, 2), (1, 3), Verdict.SAME),
        ((-2, -1), (1, 3), Verdict.OPPOSITE),
        ((-2, -1), (-1, 3), Verdict.LIVE_ONLY),
        ((-2, 1), (1, 3), Verdict.SIMULATED_ONLY),
        ((-2, 1), (-1, 3), Verdict.NEITHER),
    ],
)
def test_worlds_agree_only_where_both_tell_a_pair_apart(
    live: tuple[float, float], modelled: tuple[float, float], verdict: Verdict
) -> None:
    pair = Pair(first="a", second="b", count=9, live=difference(*live), simulated=difference(*modelled))
    assert pair.verdict == verdict
    summary, line = pair_lines("e2e", "mean", [pair])
    assert summary == f"  e2e mean: of 1 pairs 1 {verdict}"
    soonest = {-1: ": a first", 1: ": b first"}[pair.live.sign] if verdict == Verdict.SAME else ""
    assert f"{verdict}{soonest} (n 9)" in line


def test_pairs_are_made_of_the_requests_that_all_four_runs_served() -> None:
    live = {"a": world(0.0, noise_s=0.1, seed=2), "b": world(1.0, noise_s=0.1, seed=3)}
    modelled = {"a": world(0.0, noise_s=0.1, seed=4, count=150), "b": world(1.0, noise_s=0.1, seed=5)}
    (pair,) = pairs(live, modelled, "TTFT")["mean"]
    assert (pair.first, pair.second, pair.count) == ("a", "b", 150)
    assert pair.verdict == Verdict.SAME


@pytest.mark.parametrize("limits", unequal.LIMITS)
def test_settings_of_an_engine_are_ones_that_workers_know(limits: unequal.Limits) -> None:
    def config(engine: str) -> WorkerConfig:
        fields: dict[str, Any] = {"name": "w", "model": "m", "engine": engine, **limits.settings(engine)}
        return msgspec.convert(fields, WorkerConfig)

    assert config("vllm").max_num_seqs == limits.sequences
    assert modelled_parameters(config("modelled")) == scheduler_parameters(limits.record("w"), prefix_caching=True)
