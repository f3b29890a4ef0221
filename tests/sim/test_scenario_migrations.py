"""Scenarios whose sequences move: prefill and decode split, its speed, and what faults do to it."""

import io
from pathlib import Path
from typing import Any

from millrace.actor.settings import with_settings
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.step_time_models import LinearStepTime
from rich.console import Console

from simulator.scenarios.reading import read_scenario, scenario_of
from simulator.scenarios.running import ScenarioOutcome, run_scenario
from simulator.scenarios.saving import save
from simulator.scenarios.statistics import summarise
from simulator.scenarios.tables import run_tables

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "scenarios" / "disaggregated.toml"
ENGINE = {"max_model_len": 4096, "blocks_total": 2000, "max_sequences": 32, "token_budget": 2048}
SPLIT: dict[str, Any] = {
    "seed": 5,
    "cluster": {
        "groups": [
            {"name": name, "instances": 2, "step_time": "made-up", "engine": {**ENGINE, "prefix_caching": False}}
            for name in ("front", "back")
        ]
    },
    "migration": {"on": True, "roles": {"front": "prefill", "back": "decode"}},
    "intervals": {"status_ms": 20, "summary_ms": 25},
    "workload": {
        "count": 80,
        "arrivals": {"kind": "poisson", "rate_per_s": 8.0},
        "lengths": {"kind": "log_normal", "prompt_mean": 900, "output_mean": 60, "prompt_max": 3000, "output_max": 300},
    },
}


def step_times(_name: str) -> LinearStepTime:
    return LinearStepTime(fixed=8e6, per_decode=2e5, per_prefill_token=5e4, per_context_token=400.0)


def run(*settings: str, **tables: Any) -> ScenarioOutcome:
    return run_scenario(scenario_of(with_settings({**SPLIT, **tables}, settings)), step_times=step_times)


def test_requests_prefill_at_the_front_and_end_at_the_back(tmp_path: Path) -> None:
    outcome = run()
    summary = summarise(outcome)
    assert summary.served == 80
    assert summary.continuations == 0
    long_lived = [record for record in outcome.finished if record.output_tokens > 20]
    assert {record.instance[:5] for record in long_lived} == {"back-"}
    assert all(m.source.startswith("front") and m.target.startswith("back") for m in outcome.migrations)
    assert summary.migrations["moved"] >= len(long_lived)
    assert 0 < summary.frozen_s.largest < 0.1
    printed = io.StringIO()
    Console(width=120, file=printed).print(run_tables(outcome, summary))
    save(outcome, summary, tmp_path)
    assert (tmp_path / "migrations.npz").stat().st_size > 500
    assert "frozen, ms" in printed.getvalue()
    assert f"{summary.migrations['moved']} moved" in printed.getvalue()


def test_where_prompts_are_long_prefill_and_decode_apart_keep_more_of_the_slo() -> None:
    """Each of twelve requests a second and instance moves with its first token: docs/SIMULATION.md."""
    apart, colocated = (
        summarise(
            run_scenario(
                read_scenario(EXAMPLE, ["workload.count=400", f"migration.on={on}"]), step_times=load_step_time
            )
        )
        for on in ("true", "false")
    )
    assert apart.migrations["moved"] == 400
    assert apart.goodput > 0.95
    assert colocated.goodput < 0.9


def test_off_nothing_moves_whatever_else_the_table_says() -> None:
    off = run("migration.on=false")
    assert not off.migrations
    assert off.trace_hash == run("migration={}").trace_hash
    assert {record.instance[:5] for record in off.finished} == {"front", "back-"}


def test_a_slower_link_takes_longer_and_stops_nobody_for_longer() -> None:
    fast, slow = (run(f"migration.bandwidth_gbps={gbps}") for gbps in (400, 5))
    last = [max(m.duration_ns for m in outcome.migrations if m.outcome == "moved") for outcome in (fast, slow)]
    assert last[1] > 3 * last[0]
    assert summarise(slow).frozen_s.p50 < 0.02
    assert summarise(slow).served == 80
