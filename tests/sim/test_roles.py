"""Roles that flip under load: capable stages at all times, no flip to and fro, quiet under a steady load."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from millrace.actor.settings import with_settings
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.sim.checkers.roles import CapableRoles

from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import ScenarioOutcome, run_scenario
from simulator.scenarios.statistics import summarise

S = 1_000_000_000
ENGINE = {
    "max_model_len": 4096,
    "blocks_total": 1200,
    "max_sequences": 48,
    "token_budget": 1024,
    "prefix_caching": False,
}
SPLIT: dict[str, Any] = {
    "seed": 5,
    "cluster": {
        "groups": [
            {"name": name, "instances": 2, "step_time": "made-up", "engine": ENGINE} for name in ("front", "back")
        ]
    },
    "prediction": {"kind": "none"},
    "migration": {"on": True, "roles": {"front": "prefill", "back": "decode"}},
    "roles": {"policy": "pressure", "parameters": {"ttft_s": 1.0, "tpot_s": 0.02, "chunk_tokens": 1024}},
    "intervals": {"status_ms": 50, "summary_ms": 50},
    "workload": {
        "count": 300,
        "arrivals": {"kind": "poisson", "rate_per_s": 5.0},
        "lengths": {"kind": "log_normal", "prompt_mean": 900, "output_mean": 60, "prompt_max": 3000, "output_max": 300},
    },
}
DRIFT = {
    "phases": [{"prompt_scale": 0.1}, {"prompt_scale": 0.1, "output_scale": 12.0}],
    "arrivals": {"kind": "poisson", "rate_per_s": 8.0},
}


def step_times(_name: str) -> LinearStepTime:
    return LinearStepTime(fixed=8e6, per_decode=2e5, per_prefill_token=5e4, per_context_token=400.0)


def run(*settings: str, checker: CapableRoles, **tables: Any) -> ScenarioOutcome:
    workload = {**SPLIT["workload"], **tables.pop("workload", {})}
    spec = scenario_of(with_settings({**SPLIT, "workload": workload, **tables}, settings))
    return run_scenario(spec, step_times=step_times, checkers=[checker])


def drifted(policy: str, brokers: bool) -> tuple[CapableRoles, ScenarioOutcome]:
    checker = CapableRoles(gap_ns=10 * S)
    parameters = "" if policy == "pressure" else "roles.parameters={}"
    settings = [f"roles.policy={policy}", f"trading.on={str(brokers).lower()}", *([parameters] if parameters else [])]
    return checker, run(*settings, checker=checker, workload=DRIFT)


known_drift = functools.cache(drifted)


@pytest.mark.parametrize("brokers", [True, False])
@pytest.mark.parametrize("policy", ["pressure", "flowkv"])
def test_an_idle_phase_helps_the_overloaded_one(policy: str, brokers: bool) -> None:
    checker, outcome = known_drift(policy, brokers)
    summary = summarise(outcome)
    assert (summary.served, summary.continuations) == (300, 0)
    helped = [name for _, name, before, _ in checker.flips if before == "prefill"]
    assert helped
    assert set(helped) <= {"front-0", "front-1"}
    assert outcome.ladder[-1].flips >= 1


@pytest.mark.parametrize("policy", ["pressure", "flowkv"])
def test_a_steady_load_flips_nobody(policy: str) -> None:
    checker = CapableRoles(gap_ns=10 * S)
    parameters = [] if policy == "pressure" else ["roles.parameters={}"]
    outcome = run(f"roles.policy={policy}", *parameters, checker=checker, workload={"count": 600})
    assert summarise(outcome).served == 600
    assert checker.flips == []


def test_the_same_seed_gives_the_same_flips() -> None:
    (checker, first), (second, again) = known_drift("pressure", True), drifted("pressure", True)
    assert checker.flips == second.flips != []
    assert first.trace_hash == again.trace_hash


@pytest.mark.parametrize("seed", range(4))
def test_stages_stay_capable_whoever_dies(seed: int) -> None:
    """Allow an instance that died and came back to be flipped anew at once: nobody remembers when it was flipped."""
    checker = CapableRoles(gap_ns=0)
    faults = [
        {"at_s": 8.0 + seed, "kind": "kill", "target": "front-0"},
        {"at_s": 20.0, "kind": "kill", "target": "coordinator-0"},
        {"at_s": 31.0, "kind": "kill", "target": "back-1"},
        {"at_s": 36.0, "kind": "partition", "target": "front-1", "duration_s": 5.0},
        {"at_s": 45.0 + seed, "kind": "stop_bus", "duration_s": 2.0},
        {"at_s": 50.0, "kind": "kill", "target": "broker-back-0"},
    ]
    outcome = run(f"seed={seed}", "trading.on=true", checker=checker, workload=DRIFT, faults=faults)
    assert outcome.outcomes == {"completed": 300}


# Priority inside an instance: all do both, long prompts come between long answers.

MIXED: dict[str, Any] = {
    "migration": {"on": True},
    "trading": {"on": False},
    "workload": {"arrivals": {"kind": "poisson", "rate_per_s": 45.0}, "count": 300},
}
BOUNDED = (
    "roles.parameters.step_share=0.8",
    "roles.parameters.step_tokens_min=128",
    "roles.parameters.slowdown_max=0.9",
    "roles.parameters.flips=false",
)


def test_decodes_first_keeps_their_pace_beside_prompts_and_loses_nothing() -> None:
    plain = run(
        "roles.parameters.flips=false", "roles.parameters.step_share=0", checker=CapableRoles(gap_ns=0), **MIXED
    )
    bounded = run(*BOUNDED, checker=CapableRoles(gap_ns=0), **MIXED)
    before, after = summarise(plain), summarise(bounded)
    assert (before.served, after.served, after.continuations) == (300, 300, 0)
    assert after.tpot_s.p99 < 0.8 * before.tpot_s.p99
    assert {report.rung for report in plain.ladder} <= {"dispatch", "move", "replan"}
    assert "priority" in {report.rung for report in bounded.ladder}


@pytest.mark.parametrize("seed", range(3))
def test_bounded_steps_survive_kills_of_who_orders_and_who_obeys(seed: int) -> None:
    faults = [
        {"at_s": 3.0 + seed, "kind": "kill", "target": "coordinator-0"},
        {"at_s": 4.5, "kind": "kill", "target": "front-0"},
        {"at_s": 6.0, "kind": "partition", "target": "back-1", "duration_s": 2.0},
        {"at_s": 9.0, "kind": "stop_bus", "duration_s": 1.5},
    ]
    outcome = run(f"seed={seed}", *BOUNDED, checker=CapableRoles(gap_ns=0), faults=faults, **MIXED)
    assert outcome.outcomes == {"completed": 300}
    assert any(report.step_budgets for report in outcome.ladder)
