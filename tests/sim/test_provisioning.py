"""Instances come and go in virtual time: the coordinator's and the supervisor's own actors, with a cold start."""

from typing import Any

import msgspec
from millrace.enginemodel.coefficients import load_coefficients
from millrace.sim.runtime_sim import SECOND

from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import ScenarioOutcome, run_scenario
from simulator.scenarios.spec import ScenarioSpec

COLD_START_S = 10.0
RULES = {
    "threshold_s": 12.0,
    "instances_min": 2,
    "instances_max": 4,
    "cooldown_s": 5.0,
    "low_utilisation": 0.5,
    "low_s": 5.0,
}


def run(strategy: str, *, rules: dict[str, Any] | None = None, **fields: Any) -> ScenarioOutcome:
    """Two instances where three are needed: 15 requests a second of 200 + 200 tokens, for 67 s."""
    engine = {"blocks_total": 1056, "max_sequences": 48, "token_budget": 512, "prefix_caching": False}
    provisioning = {"strategy": strategy, "parameters": RULES | (rules or {})}
    scenario = {
        "cluster": {
            "groups": [{"name": "a", "instances": 2, "step_time": "a30-llama-2-7b", "engine": engine}],
            "cold_start_s": COLD_START_S,
        },
        "dispatch": {"policy": "join_shortest_queue"},
        "provisioning": provisioning if strategy != "none" else {},
        "workload": {
            "count": 1000,
            "arrivals": {"kind": "poisson", "rate_per_s": 15.0},
            "lengths": {"kind": "log_normal", "prompt_mean": 200, "output_mean": 200},
        },
        **fields,
    }
    return run_scenario(msgspec.convert(scenario, ScenarioSpec), step_times=load_coefficients)


def instances_at(outcome: ScenarioOutcome) -> dict[int, int]:
    """Instances that spoke, by second."""
    seen: dict[int, set[str]] = {}
    for sample in outcome.samples:
        seen.setdefault(sample.at_ns // SECOND, set()).add(sample.instance)
    return {second: len(names) for second, names in sorted(seen.items())}


def mean_s(outcome: ScenarioOutcome) -> float:
    return sum(finished.e2e_ns for finished in outcome.finished) / len(outcome.finished) / SECOND


def test_instances_are_added_under_load_after_a_cold_start_and_leave_when_it_ends() -> None:
    relief = run("relief")
    assert relief.outcomes == {"completed": 1000}
    counts = instances_at(relief)
    assert max(counts.values()) in (3, 4)
    assert min(second for second, count in counts.items() if count > 2) > COLD_START_S + RULES["threshold_s"]
    assert {finished.instance for finished in relief.finished} > {"a-0", "a-1"}
    assert mean_s(relief) < mean_s(run("none"))


def test_draining_fails_no_request() -> None:
    rules = {"instances_min": 1, "low_utilisation": 0.9, "low_s": 1.0, "cooldown_s": 2.0, "threshold_s": 1e6}
    slow: dict[str, Any] = {"workload": {"count": 100, "arrivals": {"kind": "poisson", "rate_per_s": 4.0}}}
    outcome = run("relief", rules=rules, **slow)
    assert outcome.outcomes == {"completed": 100}
    counts = list(instances_at(outcome).values())
    assert counts[0] == 2
    assert counts[-1] == 1


def test_spares_are_what_the_bound_leaves() -> None:
    def spares(running: int, **fields: Any) -> int:
        table = {"cluster": {"groups": [{"instances": running}]}, "provisioning": fields}
        return len(scenario_of(table).spare_groups())

    rules = {"strategy": "relief", "parameters": {"instances_max": 10}}
    assert [spares(6, **rules), spares(12, **rules), spares(6)] == [4, 0, 0]
