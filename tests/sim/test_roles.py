"""Roles that a policy flips under load, and steps bounded for decodes: promises kept under faults."""

from typing import Any

from millrace.actor.effects import Effect
from millrace.actor.settings import with_settings
from millrace.contracts.message import Message
from millrace.contracts.worker import SetStepBudget
from millrace.sim.checkers import Checker
from millrace.sim.checkers.roles import CapableRoles
from millrace.sim.process import SimProcess

from papers.flowkv import roles as flowkv
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import ScenarioOutcome, run_scenario
from simulator.scenarios.statistics import summarise
from tests.sim.test_scenario_migrations import SPLIT, step_times

S = 1_000_000_000
ENGINE = {"blocks_total": 1200, "max_sequences": 48, "token_budget": 1024}
FLIPPED: dict[str, Any] = SPLIT | {
    "cluster": {"groups": [group | {"engine": group["engine"] | ENGINE} for group in SPLIT["cluster"]["groups"]]},
    "prediction": {"kind": "none"},
    "roles": {"policy": flowkv.__file__},
    "intervals": {"status_ms": 50, "summary_ms": 50},
    "workload": SPLIT["workload"] | {"count": 300, "arrivals": {"kind": "poisson", "rate_per_s": 5.0}},
}
DRIFT = {
    "phases": [{"prompt_scale": 0.1}, {"prompt_scale": 0.1, "output_scale": 12.0}],
    "arrivals": {"kind": "poisson", "rate_per_s": 8.0},
}


def run(*settings: str, checker: Checker, **tables: Any) -> ScenarioOutcome:
    workload = {**FLIPPED["workload"], **tables.pop("workload", {})}
    spec = scenario_of(with_settings({**FLIPPED, "workload": workload, **tables}, settings))
    return run_scenario(spec, step_times=step_times, checkers=[checker])


def test_an_idle_phase_helps_the_overloaded_one() -> None:
    checker = CapableRoles(gap_ns=10 * S)
    summary = summarise(run(checker=checker, workload=DRIFT))
    assert (summary.served, summary.continuations) == (300, 0)
    helped = {name for _, name, before, _ in checker.flips if before == "prefill"}
    assert helped
    assert helped <= {"front-0", "front-1"}


def test_a_steady_load_flips_nobody() -> None:
    checker = CapableRoles(gap_ns=10 * S)
    assert summarise(run(checker=checker, workload={"count": 600})).served == 600
    assert checker.flips == []


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


def test_bounded_steps_survive_kills_of_who_orders_and_who_obeys() -> None:
    faults = [
        {"at_s": 3.0, "kind": "kill", "target": "coordinator-0"},
        {"at_s": 4.5, "kind": "kill", "target": "front-0"},
        {"at_s": 6.0, "kind": "partition", "target": "back-1", "duration_s": 2.0},
        {"at_s": 9.0, "kind": "stop_bus", "duration_s": 1.5},
    ]
    checker = Bounds()
    outcome = run(checker=checker, faults=faults, **MIXED, **BOUNDED)
    assert outcome.outcomes == {"completed": 300}
    assert checker.tokens - {0}
