"""Pairs of policies in both worlds, and unequal engines: their settings, their load, their replay."""

from __future__ import annotations

import argparse
from random import Random
from typing import Any

import msgspec
import pytest
from millrace.enginemodel.registered import scheduler_parameters

from bench.live import unequal
from bench.live.pairs import Difference, Key, Pair, Verdict, differences, pair_lines, pairs
from bench.live.plan import Load, planned
from bench.live.recording import Figures
from bench.live.rig import worker_words
from bench.live_policies import add_options, campaign_of
from services.worker.config import WorkerConfig
from services.worker.modelled import modelled_parameters

RECORDS = [limits.record(f"worker-{index}") for index, limits in enumerate(unequal.LIMITS)]
LOAD = msgspec.structs.replace(unequal.LOAD, count=40, rate_per_s=12.0, seed=3)


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


def test_two_alike_are_not_told_apart_and_nothing_is_said_of_none() -> None:
    one, other = world(0.0, noise_s=0.3, seed=2), world(0.0, noise_s=0.3, seed=4)
    assert differences(one, other, sorted(one), "e2e")["mean"].sign == 0
    assert differences(one, other, [], "e2e")["p99"].sign == 0


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


def test_a_share_of_the_outputs_is_long_and_without_one_nothing_is_drawn_for_it() -> None:
    lengths = [request.max_tokens for request in planned(msgspec.structs.replace(LOAD, count=400))]
    assert 20 < sum(length > 140 for length in lengths) < 70
    plain = Load(kind="stated", count=5, rate_per_s=1.0, seed=3)
    assert planned(plain) == planned(msgspec.structs.replace(plain, long_mean=300.0))


def test_unequal_engines_have_a_load_of_their_own_and_words_go_over_it() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    even, uneven = campaign_of(parser.parse_args([])), campaign_of(parser.parse_args(["--unequal"]))
    assert (even.kinds, even.workers, even.load.long_share) == (("stated", "tagged"), ({}, {}), 0.0)
    assert uneven.kinds == ("stated",)
    assert (uneven.workers[0]["max_num_seqs"], uneven.workers[1]["max_num_seqs"]) == (16, 2)
    assert uneven.load.long_share > 0
    told = campaign_of(parser.parse_args(["--unequal", "--cv", "1", "--count", "9", "--policies", "random,forecast"]))
    assert (told.load.cv, told.count, told.policies) == (1.0, 9, ("random", "forecast"))


@pytest.mark.parametrize("limits", unequal.LIMITS)
def test_settings_of_an_engine_are_ones_that_workers_know(limits: unequal.Limits) -> None:
    def config(engine: str) -> WorkerConfig:
        fields: dict[str, Any] = {"name": "w", "model": "m", "engine": engine, **limits.settings(engine)}
        return msgspec.convert(fields, WorkerConfig)

    assert config("vllm").max_num_seqs == limits.sequences
    assert modelled_parameters(config("modelled")) == scheduler_parameters(limits.record("w"), prefix_caching=True)


def test_each_worker_is_told_its_own_and_one_without_settings_nothing() -> None:
    assert worker_words([{}, {"seed": 1}]) == ["--set", 'worker-1={"seed": 1}']
