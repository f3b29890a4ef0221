"""Pairs of policies in both worlds, and unequal engines: their settings, their load, their replay."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from millrace.enginemodel.registered import scheduler_parameters
from millrace.enginemodel.step_time_models import LinearStepTime

from bench.live import unequal
from bench.live.pairs import Difference, Key, Pair, Verdict, differences, keyed, pair_lines, pairs
from bench.live.plan import Load, planned
from bench.live.recording import Figures
from bench.live.rehearse import capacity_per_s, rehearsal_lines, rehearsed, simulated
from bench.live.replay import EngineFit, replay, scenario
from bench.live.rig import worker_words
from bench.live.transit import Transit
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


def test_a_request_has_the_number_of_the_plan_in_both_worlds() -> None:
    recording = rehearsed(LOAD, policy="random", records=RECORDS, number=2)
    first, second, *others = recording.outcomes
    swapped = [msgspec.structs.replace(first, arrival_ns=second.arrival_ns + 1), second, *others]
    recording = msgspec.structs.replace(recording, outcomes=swapped)
    live = keyed(recording, [figure("r1", at_s=0.0, e2e_s=1.0), figure("lost", at_s=0.0, e2e_s=1.0)], simulated=False)
    again = keyed(recording, [figure("0", at_s=0.0, e2e_s=1.0)], simulated=True)
    assert list(live) == list(again) == [(2, 1)]


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


def test_a_replay_has_the_limits_and_step_times_of_each_engine(tmp_path: Path) -> None:
    recording = rehearsed(LOAD, policy="round_robin", records=RECORDS, number=0)
    fast, slow = (LinearStepTime(fixed=fixed) for fixed in (1e6, 2e7))
    fitted = {
        record.instance: EngineFit(instance=record.instance, model=model, windows=0, sums=1.0, error=0.0)
        for record, model in zip(RECORDS, (fast, slow), strict=True)
    }
    way = Transit(hop_least=1.0, hop_mean=2.0, worker_least=0.0, worker_mean=0.0)
    spec = scenario(recording, fitted=fitted, way=way, folder=tmp_path)
    assert [group.engine for group in spec.cluster.groups] == [
        scheduler_parameters(record, prefix_caching=True) for record in RECORDS
    ]
    assert spec.cluster.groups[0].engine != spec.cluster.groups[1].engine
    done = replay(spec, tmp_path, fitted=fitted)
    paces = {name: min(f.tpot_s for f in done if f.instance.startswith(name)) for name in fitted}
    assert paces["worker-0"] == pytest.approx(0.001, rel=0.1)
    assert paces["worker-1"] == pytest.approx(0.020, rel=0.1)


def test_a_rehearsal_of_unequal_engines_tells_a_blind_policy_from_one_that_looks() -> None:
    done = {}
    for policy in ("join_shortest_queue", "round_robin"):
        recording = rehearsed(LOAD, policy=policy, records=RECORDS, number=0)
        done[policy] = keyed(recording, simulated(recording), simulated=True)
    assert all(len(requests) == LOAD.count for requests in done.values())
    small = {p: sum(f.instance.startswith("worker-1") for f in requests.values()) for p, requests in done.items()}
    assert small["round_robin"] == LOAD.count / 2 > small["join_shortest_queue"]
    lines = rehearsal_lines(done)
    assert any(
        "e2e  mean join_shortest_queue - round_robin" in line and "1 of 1 rounds say first" in line for line in lines
    )


def test_the_smaller_engine_serves_the_smaller_part_of_a_capacity() -> None:
    whole, larger = capacity_per_s(RECORDS, LOAD), capacity_per_s(RECORDS[:1], LOAD)
    assert 0.5 * whole < larger < whole
