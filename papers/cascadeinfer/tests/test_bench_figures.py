"""The harness of the stages figures: layers, shares of messages, paired differences."""

import math

import msgspec
import pytest

from papers.cascadeinfer.bench.stages import capacity
from papers.cascadeinfer.bench.stages import regret as regret_runs
from papers.cascadeinfer.bench.stages.regret import drawn_layouts, told_cost
from papers.cascadeinfer.bench.stages.runs import RunOptions, StageRow, kept_row, rise_of
from papers.cascadeinfer.bench.stages.setups import Setup, fixed, merged
from papers.cascadeinfer.bench.stages.tables import against, comparison, paired
from papers.cascadeinfer.bench.stages.variants import arrival_only, full, hand_over, trading
from papers.cascadeinfer.bench.stages_scale import messages_per_move
from simulator.scenarios.observer import FinishedRequest


def row(label: str, seed: int, norm: float, **fields) -> StageRow:
    numbers = dict.fromkeys(
        (
            "norm_p95",
            "ttft",
            "ttft_p99",
            "tpot",
            "tpot_p99",
            "e2e",
            "e2e_p99",
            "good",
            "output_cv",
            "virtual_s",
            "cpu_s",
        ),
        0.0,
    )
    counts = dict.fromkeys(("served", "lost", "preemptions", "moved", "refused", "messages"), 0)
    plain = {"label": label, "seed": seed, "key": f"{label}/{seed}", "norm": norm, "deciles": [norm] * 10, "trades": {}}
    return StageRow(**(numbers | counts | plain | fields))


def test_a_kept_row_may_lack_figures():
    written = row("none", 0, 1.0, output_cv=math.nan, deciles=[1.0, math.nan])
    read = kept_row(msgspec.json.encode(written))
    assert math.isnan(read.output_cv)
    assert math.isnan(read.deciles[1])
    assert (read.key, read.norm, read.deciles[0]) == (written.key, 1.0, 1.0)


def test_layers_are_laid_over_each_other_key_by_key():
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}}) == {"a": {"b": 1, "c": 4}, "d": 3}


def test_a_table_of_another_kind_takes_the_place_of_the_first():
    base = {"lengths": {"kind": "fitted", "name": "r1"}}
    other = {"lengths": {"kind": "log_normal", "prompt_mean": 500}}
    assert merged(base, other) == other


def test_differences_are_paired_by_seed():
    rows = [row("one", 0, 10.0), row("one", 1, 20.0), row("stages", 0, 9.0), row("stages", 2, 1.0)]
    assert paired(rows, "stages", "one") == [(9.0, 10.0)]
    assert against(rows, "stages", "one") == "-10.0"
    assert against(rows, "one", "one") == ""
    assert "-10.0" in comparison(rows, "one")


def test_messages_of_a_move_count_asks_and_bids():
    trades = {"answer bid": 5, "answer no_room": 1, "ended boundary moved": 2, "ended balance stays": 1}
    assert messages_per_move(row("stages", 0, 1.0, trades=trades)) == 2 * 6 / 2


@pytest.mark.parametrize("make", [hand_over, full, arrival_only])
def test_each_variant_is_a_valid_scenario_with_the_planned_stages(make):
    setup = Setup(requests=300)
    shapes = setup.planned("exact")
    assert len(shapes) > 1
    assert sum(shape.instances for shape in shapes) == setup.instances
    spec = setup.spec(make(shapes))
    assert spec.stages.policy == "fixed"
    assert spec.migration.on == (make is not arrival_only)


def test_a_layer_without_stages_trades_in_one_stage():
    spec = Setup(requests=300).spec(trading("delay"))
    assert (spec.stages.policy, spec.trading.policy) == ("one_stage", "delay")
    assert "stages" in fixed(())


def test_drawn_layouts_differ_and_use_every_instance():
    layouts = drawn_layouts(Setup(), 20)
    assert len(set(layouts)) == 20
    assert [shape.instances for shape in layouts[0]] == [8]
    for shapes in layouts:
        assert sum(shape.instances for shape in shapes) == 8
        assert shapes[0].length_min == 0
        assert shapes[-1].length_max is None
        assert [shape.length_max for shape in shapes[:-1]] == [shape.length_min for shape in shapes[1:]]


def test_half_of_the_drawn_layouts_are_near_the_exact_one():
    setup = Setup()
    exact = setup.planned("exact")
    layouts = drawn_layouts(setup, 20)
    near = [shapes for shapes in layouts if len(shapes) == len(exact)]
    apart = [sum(abs(a.instances - b.instances) for a, b in zip(shapes, exact, strict=True)) for shapes in near]
    assert sum(each <= 2 for each in apart) >= 10
    assert exact not in layouts, "the planners' own are compared with others"


def finished(number: int, *, ms_per_token: float) -> FinishedRequest:
    return FinishedRequest(
        number=number,
        outcome="completed",
        arrival_ns=number * 10**9,
        ttft_ns=0,
        e2e_ns=round(100 * ms_per_token * 1e6),
        prompt_tokens=10,
        output_tokens=100,
        cached_tokens=0,
        continuations=0,
        predicted_tokens=0.0,
        predicted_ttft_ns=-1,
        predicted_e2e_ns=-1,
        instance="w0",
    )


def test_the_rise_compares_the_later_arrivals_with_the_earlier_ones():
    steady = [finished(number, ms_per_token=20.0) for number in range(10)]
    rising = [finished(number, ms_per_token=10.0 + 10.0 * (number >= 5)) for number in reversed(range(10))]
    assert rise_of(steady) == pytest.approx(0.0)
    assert rise_of(rising) == pytest.approx(1.0)
    assert math.isnan(rise_of(steady[:1]))


def test_the_best_drawn_layout_bears_the_load(monkeypatch):
    setup = Setup(trace="ShareGPT", requests=200)
    slow, rising, lossy = 30.0, {"rise": 0.5}, {"lost": 3}

    def made(jobs, _chosen):
        """All are slow and steady, but the first two drawn ones: fast, one rising, the other with losses."""
        fast = {"drawn 0": rising, "drawn 1": lossy}
        rows = [(job.label, fast.get(job.label)) for job in jobs]
        return [row(name, 0, slow if odd is None else 1.0, **({"rise": 0.0} | (odd or {}))) for name, odd in rows]

    monkeypatch.setattr(regret_runs, "run_all", made)
    told = regret_runs.regret(setup, RunOptions(seeds=1, cores=1, path=None), plans=4)
    assert told.startswith("4 drawn layouts, 2 of which bear the load; the best is drawn 2")


def test_what_the_planner_expects_of_a_layout_is_told_or_that_it_is_an_overload():
    setup = Setup(load=0.6)
    costs, exact = setup.costs(), setup.planned("exact")
    one = drawn_layouts(setup, 1)[0]
    assert 0 < float(told_cost(costs, exact)) < float(told_cost(costs, one))
    assert told_cost(costs, regret_runs.layout_of([4096], [1, 7])) == "overload"


def test_a_layout_may_begin_with_as_many_sequences_as_it_holds_itself():
    setup = Setup(kappa=0.76)
    shapes = setup.planned("exact")
    own = setup.from_own(shapes)["workload"]
    assert 0 < own["residents"] < setup.residents()
    assert setup.spec(hand_over(shapes), setup.from_own(shapes)).workload.count == own["residents"] + setup.count


def test_every_trace_may_begin_warm_and_only_long_lived_ones_do_by_themselves():
    assert Setup(trace="ShareGPT").residents() == 0
    assert Setup(trace="ShareGPT", warm=True).residents() > 100


def test_capacity_is_found_by_halving(monkeypatch):
    def serve(jobs, chosen):
        loads = [float(job.label.rsplit(" ", 1)[1]) for job in jobs]
        limits = [0.83 if job.label.startswith("shortest") else 0.55 for job in jobs]
        return [
            row(job.label, 0, 1.0, good=0.95 if a <= b else 0.5) for job, a, b in zip(jobs, loads, limits, strict=True)
        ]

    monkeypatch.setattr(capacity, "run_all", serve)
    text = capacity.capacity_table(Setup(trace="Azure"), RunOptions(seeds=1, cores=1, path=None))
    base, planned = text.splitlines()[1:]
    assert "0.825" in base
    assert "0.550" in planned
    assert "-33.3" in planned


def test_a_search_that_is_cut_short_says_that_nothing_is_bracketed():
    kept = {0.7: True, 0.9: False}
    cut = capacity.search(lambda load: next((keeps for at, keeps in kept.items() if abs(at - load) < 1e-9), None))
    assert cut.load is None
    assert cut.told() == "not bracketed: 0.700 to 0.900"
    assert capacity.search(lambda load: None).told() == "not bracketed: no run"


def test_a_search_whose_loads_all_keep_the_slo_or_all_lose_it_says_so():
    assert capacity.search(lambda load: True).told() == "not bracketed: 1.075 or more"
    assert capacity.search(lambda load: False).told() == "not bracketed: below 0.325"


def test_seeds_that_are_not_bracketed_are_left_out_of_the_mean_and_told(monkeypatch):
    def serve(jobs, chosen):
        return [row(job.label, 0, 1.0, good=0.95) for job in jobs if job.spec.seed == 0]

    monkeypatch.setattr(capacity, "run_all", serve)
    text = capacity.capacity_table(Setup(trace="Azure"), RunOptions(seeds=2, cores=1, path=None))
    assert "not bracketed: 1.075 or more; not bracketed: no run" in text.splitlines()[1]


def test_a_steady_cluster_begins_with_what_one_stage_would_hold():
    setup = Setup(load=0.5, requests=300)
    few, many = setup.residents(), Setup(load=0.8, requests=300).residents()
    assert 0 < few < many
    assert setup.spec().workload.count == few + 300
    assert setup.spec().workload.residents == few
    assert Setup(requests=300, steady=False).spec().workload.residents == 0
