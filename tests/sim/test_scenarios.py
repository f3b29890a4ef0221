"""Scenarios from files, whole: the same seed the same run, faults lose nothing, policies from files."""

import functools
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.settings import with_settings
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.step_time_models import LinearStepTime
from rich.console import Console

from simulator.scenarios.plots import draw_run, draw_sweep
from simulator.scenarios.reading import read_scenario, scenario_of
from simulator.scenarios.running import ScenarioOutcome, run_scenario
from simulator.scenarios.saving import save
from simulator.scenarios.statistics import Summary, summarise
from simulator.scenarios.sweeping import RunInputs, run_all, variants
from simulator.scenarios.tables import run_tables

SMALL: dict[str, Any] = {
    "seed": 3,
    "cluster": {
        "groups": [
            {
                "name": "gpu",
                "instances": 3,
                "step_time": "made-up",
                "engine": {
                    "max_model_len": 1024,
                    "blocks_total": 120,
                    "max_sequences": 16,
                    "token_budget": 128,
                    "prefix_caching": False,
                },
            }
        ]
    },
    "dispatch": {"policy": "join_shortest_queue"},
    "workload": {
        "count": 150,
        "arrivals": {"kind": "poisson", "rate_per_s": 12.0},
        "lengths": {
            "kind": "log_normal",
            "prompt_mean": 120,
            "output_mean": 60,
            "prompt_sigma": 1.0,
            "output_sigma": 0.8,
            "prompt_max": 500,
            "output_max": 400,
        },
    },
}


#: A fault after the end.
LATER = 'faults=[{at_s = 9000.0, kind = "slow_disk"}]'


def step_times(name: str) -> LinearStepTime:
    assert name == "made-up"
    return LinearStepTime(fixed=8e6, per_decode=2e5, per_prefill_token=5e4, per_context_token=400.0)


def outcome_of(*settings: str) -> ScenarioOutcome:
    return run_scenario(scenario_of(with_settings(SMALL, settings)), step_times=step_times)


@functools.cache
def run(*settings: str) -> Summary:
    return summarise(outcome_of(*settings))


def latencies(summary: Summary) -> tuple[Any, ...]:
    return summary.ttft_s, summary.e2e_s, summary.tpot_s, summary.preemptions, summary.served


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    first, again, other = run(), summarise(outcome_of()), run("seed=4")
    assert first == again
    assert first.trace_hash != other.trace_hash
    assert first.served == other.served == 150


def test_decode_runs_and_coalesced_tokens_change_no_latency() -> None:
    """Round robin looks at nothing, so that both must agree to the nanosecond."""
    common = ('dispatch.policy="round_robin"', "workload.arrivals.rate_per_s=40.0")
    single = run(*common, "intervals.run_ms=0", "intervals.token_ms=0")
    together = run(*common)
    assert together.messages < single.messages / 2
    assert single.preemptions > 0
    assert latencies(single) == latencies(together)


def test_heartbeats_that_nobody_acts_on_are_left_out_where_nothing_fails_and_change_no_latency() -> None:
    quiet, harmed = (run('dispatch.policy="round_robin"', *faults) for faults in ((), (LATER,)))
    assert quiet.messages < harmed.messages
    assert latencies(quiet) == latencies(harmed)


def test_a_forecast_is_asked_for_and_comes_true() -> None:
    known = run('dispatch.policy="forecast"')
    assert known.fallbacks == 0
    assert known.ttft_error.count == known.e2e_error.count == 150
    assert known.ttft_error.absolute < 0.1
    assert known.e2e_error.absolute < 0.3


def test_engines_of_one_host_slow_each_other_where_the_scenario_says_so() -> None:
    one_host = ('cluster.groups.0.host="x"', "intervals.run_ms=0", "intervals.token_ms=0")
    alone, beside = run(*one_host), run(*one_host, "cluster.groups.0.neighbour_slowdown=0.2")
    assert 1.1 * alone.tpot_s.mean < beside.tpot_s.mean < 1.8 * alone.tpot_s.mean
    apart = run(*one_host[1:], "cluster.groups.0.neighbour_slowdown=0.2")
    assert latencies(apart) == latencies(alone)


def test_an_engine_that_was_killed_gets_its_share_again_beside_one_on_the_same_host() -> None:
    """Though each slows the other: who looked at that alone would send everybody to the one that is busy anyway."""
    run = outcome_of(
        'dispatch.policy="forecast"',
        "workload.count=300",
        'cluster.groups=[{name="gpu",instances=2,host="x",neighbour_slowdown=0.25,step_time="made-up"}]',
        'faults=[{at_s=5.0,kind="kill",target="gpu-0"}]',
        "intervals.status_ms=20",
    )
    assert run.outcomes == {"completed": 300}
    later = [request.instance for request in run.finished if request.arrival_ns > 8_000_000_000]
    assert later.count("gpu-0") > len(later) / 3


def test_noisy_lengths_are_noisy_and_unknown_ones_unknown() -> None:
    oracle, noisy, unknown = (
        outcome_of('dispatch.policy="forecast"', f'prediction.kind="{kind}"', "prediction.sigma=0.5")
        for kind in ("oracle", "noisy", "none")
    )
    assert all(record.predicted_tokens == record.output_tokens for record in oracle.finished)
    ratios = [record.predicted_tokens / record.output_tokens for record in noisy.finished]
    assert len(set(ratios)) > 100
    assert min(ratios) >= 0.1
    assert max(ratios) <= 5.0
    assert all(record.predicted_tokens == -1 for record in unknown.finished)


def test_a_killed_instance_and_a_stalled_one_lose_no_request() -> None:
    faults = [
        {"at_s": 2.0, "kind": "kill", "target": "gpu-1"},
        {"at_s": 4.0, "kind": "stall", "target": "gpu-2", "duration_s": 1.0},
        {"at_s": 6.0, "kind": "partition", "target": "gpu-0", "duration_s": 3.0},
        {"at_s": 11.0, "kind": "stop_bus", "duration_s": 1.0},
    ]
    summary = summarise(run_scenario(scenario_of({**SMALL, "faults": faults}), step_times=step_times))
    assert summary.served == 150
    assert summary.lost == 0
    assert summary.continuations > 0


def test_what_is_too_long_is_refused_and_counted_as_lost() -> None:
    outcome = outcome_of("workload.lengths.prompt_max=5000", "workload.lengths.prompt_mean=900")
    assert outcome.outcomes["refused:too_long"] > 0
    assert "limit is 1024 tokens" in outcome.details["refused:too_long"]
    assert summarise(outcome).lost == sum(n for kind, n in outcome.outcomes.items() if kind != "completed")


def test_what_never_ends_counts_as_open() -> None:
    outcome = outcome_of("limit_s=0.5", "workload.arrivals.rate_per_s=100.0")
    assert outcome.outcomes["open"] > 0


def test_results_and_pictures_are_written(tmp_path) -> None:
    outcome = outcome_of("workload.count=40")
    summary = summarise(outcome)
    save(outcome, summary, tmp_path)
    drawn = draw_run(outcome, tmp_path)
    drawn.append(draw_sweep([summary, summary], tmp_path, slo_ttft_s=3.0))
    assert len(drawn) == 4
    assert all(path.stat().st_size > 10_000 for path in drawn)
    stored = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert stored["served"] == 40
    assert stored["trace_hash"] == summary.trace_hash


def test_a_sweep_runs_every_combination_with_every_seed(tmp_path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(
        '[workload]\ncount = 5\narrivals = { kind = "poisson", rate_per_s = 1 }\n'
        '[[cluster.groups]]\nname = "gpu"\nstep_time = "made-up"\n'
    )
    wanted = variants(path, [], ["dispatch.policy=random,round_robin", "workload.arrivals.rate_per_s=5,9"], 2)
    told = list(run_all(wanted, RunInputs(step_times=step_times, folders=(tmp_path,)), jobs=1))
    assert [(summary.name, summary.seed) for summary in told] == [
        (name, seed) for name in ("random", "round_robin") for _rate in (5, 9) for seed in (0, 1)
    ]
    assert all(summary.served == 5 for summary in told)


def test_the_table_says_how_many_requests_of_the_warm_up_are_left_out() -> None:
    outcome = outcome_of("workload.warm_up=30")
    printed = io.StringIO()
    Console(width=120, file=printed).print(run_tables(outcome, summarise(outcome)))
    assert "120, 30 more of the warm-up left out of all figures" in printed.getvalue()


# Policies from files: the example, and one that raises.


EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = ("workload.count=120", "workload.warm_up=0", f"dispatch.policy={EXAMPLES / 'policy' / 'considerate.py'}")


def test_requests_are_served_on_predictions_and_mostly_by_instances_that_are_twice_as_fast() -> None:
    spec = read_scenario(EXAMPLES / "scenarios" / "mixed.toml", SETTINGS)
    outcome = run_scenario(spec, step_times=load_step_time)
    assert outcome.outcomes == {"completed": 120}
    assert outcome.fallbacks == 0
    assert min(record.predicted_e2e_ns for record in outcome.finished) > 0
    fast = sum(record.instance.startswith("fast") for record in outcome.finished)
    assert fast > 2 * (len(outcome.finished) - fast)


RAISES = """
def decide(view, parameters, state, now_ns, rng):
    if now_ns % 2 >= 0:
        raise RuntimeError("no idea")
"""


def test_a_policy_that_raises_ends_the_run_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "clueless.py"
    file.write_text(RAISES)
    scenario = str(EXAMPLES / "scenarios" / "mixed.toml")
    words = ["--set", "workload.count=5", "--set", "workload.warm_up=0", "--set", f"dispatch.policy={file}"]
    command = [sys.executable, "-m", "simulator", "sim", "--scenario", scenario, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{file}:4" in done.stderr
    assert re.search("RuntimeError.*no idea", done.stderr)
