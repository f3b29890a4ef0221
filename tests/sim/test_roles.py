"""Roles that a policy flips under load, and steps bounded for decodes: promises kept under faults."""

from typing import Any

import pytest
from millrace.actor.effects import Effect
from millrace.actor.settings import with_settings
from millrace.contracts.message import Message
from millrace.contracts.worker import SetStepBudget
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.sim.checkers import Checker
from millrace.sim.checkers.roles import CapableRoles
from millrace.sim.process import SimProcess

from papers.flowkv import roles as flowkv
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
    "roles": {"policy": flowkv.__file__},
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


def run(*settings: str, checker: Checker, **tables: Any) -> ScenarioOutcome:
    workload = {**SPLIT["workload"], **tables.pop("workload", {})}
    spec = scenario_of(with_settings({**SPLIT, "workload": workload, **tables}, settings))
    return run_scenario(spec, step_times=step_times, checkers=[checker])


def test_an_idle_phase_helps_the_overloaded_one_and_the_same_seed_flips_the_same() -> None:
    checkers = [CapableRoles(gap_ns=10 * S) for _ in range(2)]
    first, again = (run(checker=checker, workload=DRIFT) for checker in checkers)
    assert (summarise(first).served, summarise(first).continuations) == (300, 0)
    helped = {name for _, name, before, _ in checkers[0].flips if before == "prefill"}
    assert helped
    assert helped <= {"front-0", "front-1"}
    assert checkers[0].flips == checkers[1].flips
    assert first.trace_hash == again.trace_hash


def test_a_steady_load_flips_nobody() -> None:
    checker = CapableRoles(gap_ns=10 * S)
    assert summarise(run(checker=checker, workload={"count": 600})).served == 600
    assert checker.flips == []


@pytest.mark.parametrize("seed", range(2))
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
    outcome = run(f"seed={seed}", checker=checker, workload=DRIFT, faults=faults)
    assert outcome.outcomes == {"completed": 300}


# All do both, and long prompts come between long answers.

MIXED: dict[str, Any] = {
    "roles": {"policy": "fixed"},
    "migration": {"on": True},
    "workload": {"arrivals": {"kind": "poisson", "rate_per_s": 45.0}, "count": 300},
}
BOUNDED = {"step_bounds": {"tpot_s": 0.02, "ttft_s": 60.0}}


class Bounds(Checker):
    """Bounds of steps that workers are ordered."""

    def __init__(self) -> None:
        self.tokens: set[int] = set()

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        if isinstance(message.body, SetStepBudget):
            self.tokens.add(message.body.tokens)


def test_steps_are_bounded_beside_prompts_and_no_more_after_them() -> None:
    for settings, bounds in (({}, set()), (BOUNDED, {0, 512})):
        checker = Bounds()
        summary = summarise(run(checker=checker, **MIXED, **settings))
        assert (summary.served, summary.continuations) == (300, 0)
        assert {tokens if tokens in (0, 512) else -1 for tokens in checker.tokens} - {-1} == bounds


@pytest.mark.parametrize("seed", range(2))
def test_bounded_steps_survive_kills_of_who_orders_and_who_obeys(seed: int) -> None:
    faults = [
        {"at_s": 3.0 + seed, "kind": "kill", "target": "coordinator-0"},
        {"at_s": 4.5, "kind": "kill", "target": "front-0"},
        {"at_s": 6.0, "kind": "partition", "target": "back-1", "duration_s": 2.0},
        {"at_s": 9.0, "kind": "stop_bus", "duration_s": 1.5},
    ]
    checker = Bounds()
    outcome = run(f"seed={seed}", checker=checker, faults=faults, **MIXED, **BOUNDED)
    assert outcome.outcomes == {"completed": 300}
    assert checker.tokens - {0}
