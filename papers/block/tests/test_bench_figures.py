"""Foundations of Block's figures: the fluid bound, the noise, the search of capacities, tables."""

from __future__ import annotations

import argparse
import math

import msgspec
import pytest
from millrace.actor.settings import with_settings
from millrace.enginemodel.parameters import EngineParameters
from millrace.policies.dispatch import DISPATCH_POLICIES
from millrace.workloads.arrivals import FromTrace
from millrace.workloads.shape import RequestShape

from bench import forecast_default
from bench.scenarios.rows import Row, Store, key_of
from bench.scenarios.runs import OUT_OF_TIME, Job, Options, add_options, options, run_all
from bench.scenarios.scenarios import scenario
from bench.scenarios.tables import confidence, figure, gains, gains_table, latency_table, table
from papers.block.bench.bound import fluid_bound, resident_tokens
from papers.block.bench.capacity import at_rate, capacities
from papers.block.bench.noise import BLOCK_SIGMA, quality
from papers.block.bench.variants import POLICIES, policy_settings
from simulator.scenarios.reading import ScenarioError, scenario_of
from simulator.scenarios.spec import ClusterTable, Group, ScenarioSpec, WorkloadSpec

SHAPES = [RequestShape(200, 300), RequestShape(600, 100), RequestShape(50, 700)]


def cluster(instances: int = 1, *, speed: float = 1.0, blocks: int = 1056, batch: int = 48) -> ScenarioSpec:
    engine = EngineParameters(max_model_len=4096, blocks_total=blocks, max_sequences=batch, token_budget=512)
    group = Group(instances=instances, speed=speed, step_time="a30-llama-2-7b", engine=engine)
    return ScenarioSpec(cluster=ClusterTable(groups=(group,)))


def row(spec: ScenarioSpec, label: str, rate: float, *, ttft_p99: float) -> Row:
    kinds = Row.__annotations__
    times: dict[str, object] = {name: 1.0 for name, kind in kinds.items() if kind in ("float", "float | None")}
    counts: dict[str, object] = {name: 0 for name, kind in kinds.items() if kind == "int"}
    words = {"label": label, "key": key_of(spec), "trace_hash": ""}
    given = {"rate": rate, "seed": spec.seed, "ttft_p99": ttft_p99}
    return msgspec.convert({**times, **counts, **words, **given}, Row)


def test_the_bound_grows_with_instances_speed_and_memory_and_falls_with_the_batch_cap():
    one = fluid_bound(cluster(), SHAPES)
    assert fluid_bound(cluster(3), SHAPES) == pytest.approx(3 * one)
    assert fluid_bound(cluster(speed=2.0), SHAPES) == pytest.approx(2 * one)
    assert fluid_bound(cluster(blocks=2112), SHAPES) > one
    assert fluid_bound(cluster(batch=8), SHAPES) < one


def test_long_answers_weigh_more_in_the_context_of_decoding_sequences():
    assert resident_tokens([RequestShape(10, 100), RequestShape(1000, 1)]) < 100
    assert resident_tokens([RequestShape(100, 50)]) == pytest.approx(125)


def test_the_noise_is_as_wrong_as_blocks_tagger_where_lengths_are_its_lengths():
    got = quality([326] * 20_000, BLOCK_SIGMA)
    assert got.error_rate == pytest.approx(0.242, abs=0.005)
    assert got.error_tokens == pytest.approx(78.755, abs=1.5)
    assert quality([326] * 100, 0.0).within_50 == 1.0


def test_each_capacity_is_found_between_the_rates_that_held_and_did_not():
    limits = {"weak": 25.4, "strong": 33.1, "hopeless": 1.0}
    store = Store(None)
    specs = {label: msgspec.structs.replace(cluster(), limit_s=limit) for label, limit in limits.items()}
    for label, spec in specs.items():
        for step in range(33):
            rate = 24.0 + step / 2
            at = at_rate(spec, rate)
            store.put(row(at, label, rate, ttft_p99=1.0 if rate <= limits[label] else 9.0))
    chosen = Options(requests=1, seeds=1, cores=1, store=store)
    found, rows = capacities(specs, chosen, bound_s=3.0, low=24.0, high=40.0, tolerance=0.5)
    assert {each.label: each.rates for each in found} == {"weak": [25.0], "strong": [33.0], "hopeless": [24.0]}
    assert [each.rate for each in rows if each.label == "hopeless"] == [24.0]


def test_a_trace_has_no_rate_to_search():
    assert at_rate(ScenarioSpec(), 5.0).workload.arrivals.rate_per_s == 5.0
    with pytest.raises(ScenarioError, match="no rate to search"):
        at_rate(ScenarioSpec(workload=WorkloadSpec(arrivals=FromTrace())), 5.0)


def test_a_scenario_is_kept_under_its_own_key_whatever_its_name():
    spec = cluster()
    assert key_of(msgspec.structs.replace(spec, name="other")) == key_of(spec)
    assert key_of(msgspec.structs.replace(spec, seed=1)) != key_of(spec)
    jobs = Options(requests=1, seeds=2, cores=1, store=Store(None)).variations("a", 1.0, spec)
    assert [(type(job), job.spec.seed) for job in jobs] == [(Job, 0), (Job, 1)]


@pytest.mark.parametrize("name", [*POLICIES, "forecast*", "forecast* d=2"])
def test_every_policy_of_the_tables_is_a_scenario(name):
    spec = scenario_of(with_settings({}, policy_settings(name, 0.3)))
    DISPATCH_POLICIES.choose(spec.dispatch.policy, spec.dispatch.parameters)
    assert (spec.prediction.kind == "noisy") == ("*" in name)


def test_intervals_need_two_values_and_narrow_with_more():
    assert math.isnan(confidence([4.0])[1])
    assert confidence([4.0, 6.0])[0] == 5.0
    assert confidence([4.0, 6.0] * 8)[1] < confidence([4.0, 6.0] * 2)[1]
    assert figure([4.0]) == "4.00"
    assert figure([]) == "-"


def test_tables_have_a_line_per_label_and_means_over_its_seeds():
    spec = cluster()
    text = latency_table(["a", "b"], [row(spec, "a", 1.0, ttft_p99=2.0), row(spec, "a", 1.0, ttft_p99=4.0)])
    lines = text.splitlines()
    assert len(lines) == 3
    assert "3.00 ±" in lines[1]
    assert table(["", "x"], [["long name", "1"]]).splitlines()[1] == "long name  1"


def test_gains_are_paired_by_seed_and_leave_out_seeds_that_only_one_has():
    first, second = cluster(), msgspec.structs.replace(cluster(), seed=1)
    rows = [row(first, "slow", 1.0, ttft_p99=4.0), row(second, "slow", 1.0, ttft_p99=8.0)]
    rows.append(row(second, "quick", 1.0, ttft_p99=6.0))
    assert gains(rows, "quick", "slow") == ["0.0", "-25.0", "0.0", "0.0", "0.0"]
    assert gains(rows, "quick", "unknown") == []
    assert gains_table(rows, ["slow", "quick"], "slow").count("\n") == 1


def test_a_figure_whose_time_is_up_begins_no_run_and_says_so_by_its_status():
    spec = cluster()
    store = Store(None)
    store.put(row(spec, "kept", 1.0, ttft_p99=1.0))
    chosen = Options(requests=1, seeds=1, cores=1, store=store, until_s=0.0)
    assert [each.label for each in run_all([Job(label="again", rate=1.0, spec=spec)], chosen)] == ["again"]
    missing = Job(label="missing", rate=1.0, spec=msgspec.structs.replace(spec, seed=1))
    with pytest.raises(SystemExit) as stopped:
        run_all([missing], chosen)
    assert stopped.value.code == OUT_OF_TIME


def test_a_figure_that_may_be_cut_off_must_keep_its_runs():
    parser = argparse.ArgumentParser()
    add_options(parser, requests=1, seeds=1)
    with pytest.raises(SystemExit, match="needs --rows"):
        options(parser.parse_args(["--stop-after", "5"]))


def test_tables_say_how_many_requests_and_seeds_they_are_of():
    chosen = Options(requests=3000, seeds=5, cores=1, store=Store(None))
    assert chosen.told == "3,000 requests a run, seeds 0 to 4, ± a 95 % t-interval over them"
    assert msgspec.structs.replace(chosen, seeds=1).told.endswith("seed 0 alone")


def test_the_scenario_of_unequal_halves_can_be_read() -> None:
    file, settings = forecast_default.base("halves@42", 100, 0)
    slow, fast = scenario(file, settings).cluster.groups
    assert (slow.speed, fast.speed) == (1.0, 2.0)
    assert fast.engine == slow.engine


def test_each_policy_adds_up_the_delay_of_others_in_each_way() -> None:
    found = forecast_default.dispatches(["forecast"], ["preempting", "always"])
    assert [label for label, _ in found] == ["forecast preempting", "forecast always"]
    assert found[1][1] == ["dispatch.policy=forecast", "dispatch.parameters.others_summed=always"]
    assert forecast_default.dispatches(["forecast"], []) == [("forecast", ["dispatch.policy=forecast"])]


def test_differences_are_paired_by_seed_with_the_better_simple_rule() -> None:
    waits = dict.fromkeys(forecast_default.SIMPLE, (3.0, 3.0))
    waits |= {"join_shortest_queue": (1.0, 2.0), "llumnix": (3.0, 1.0), "forecast, none": (1.1, 2.6)}
    rows = [
        row(msgspec.structs.replace(cluster(), seed=seed), label, 0.0, ttft_p99=wait)
        for label, each in waits.items()
        for seed, wait in enumerate(each)
    ]
    line = forecast_default.differences(rows).splitlines()[-1]
    assert line.split() == ["forecast,", "none", *"0.0 ±0.0 20.0 ±127.1 0.0 ±0.0 0.0 ±0.0".split()]
