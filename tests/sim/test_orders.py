"""An operator's orders in virtual time: instances by shape and role, and roles, with a cold start and under load."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.sim.checkers.roles import CapableRoles

from simulator.scenarios.running import ScenarioOutcome, run_scenario
from simulator.scenarios.spec import ScenarioSpec

S = 1_000_000_000
ENGINE = {"max_model_len": 4096, "blocks_total": 1200, "max_sequences": 48, "token_budget": 1024}


def step_times(name: str) -> LinearStepTime:
    speed = 0.5 if name == "fast" else 1.0
    return LinearStepTime(
        fixed=8e6 * speed, per_decode=2e5 * speed, per_prefill_token=5e4 * speed, per_context_token=400.0 * speed
    )


def run(*orders: dict[str, Any], seed: int = 1, **fields: Any) -> ScenarioOutcome:
    """Two slow instances, with spare ones of both kinds."""
    groups = [
        {"name": "slow", "instances": 2, "spares": 1, "shape": "l40s", "step_time": "slow", "engine": ENGINE},
        {"name": "fast", "instances": 1, "spares": 2, "shape": "h200x2", "step_time": "fast", "engine": ENGINE},
    ]
    scenario = {
        "seed": seed,
        "cluster": {"groups": groups},
        "prediction": {"kind": "none"},
        "migration": {"on": True},
        "trading": {"policy": "none"},
        "provisioning": {"cold_start_s": 3.0},
        "orders": orders,
        "workload": {
            "count": 240,
            "arrivals": {"kind": "poisson", "rate_per_s": 6.0},
            "lengths": {"kind": "log_normal", "prompt_mean": 300, "output_mean": 200, "output_max": 600},
        },
        **fields,
    }
    checker = CapableRoles(gap_ns=10 * S)
    return run_scenario(msgspec.convert(scenario, ScenarioSpec), step_times=step_times, checkers=[checker])


def served_by(outcome: ScenarioOutcome) -> set[str]:
    return {finished.instance for finished in outcome.finished}


def spoke_after(outcome: ScenarioOutcome, at_s: float) -> set[str]:
    return {sample.instance for sample in outcome.samples if sample.at_ns > at_s * S}


def test_instances_of_a_shape_come_and_go_and_no_request_fails() -> None:
    outcome = run(
        {"at_s": 3.0, "count": 3, "shape": "h200x2"},
        {"at_s": 4.0, "count": 9, "shape": "l40s"},
        {"at_s": 15.0, "count": 9, "shape": "a100"},
        {"at_s": 20.0, "count": 0, "shape": "l40s"},
    )
    assert outcome.outcomes == {"completed": 240}
    assert outcome.answers[0] == "accepted: fast-1, fast-2 begins"
    assert outcome.answers[1].startswith("scaling: under way: fast-1, fast-2")
    assert outcome.answers[2].startswith(
        "unknown_shape: unknown_shape: no a100 for modelled here; shapes: h200x2, l40s"
    )
    assert outcome.answers[3].startswith("accepted: slow-")
    assert "drains, empty within" in outcome.answers[3]
    assert served_by(outcome) == {"slow-0", "slow-1", "fast-0", "fast-1", "fast-2"}
    assert spoke_after(outcome, 35.0) == {"fast-0", "fast-1", "fast-2"}
    assert sum(record.reason == "drain" for record in outcome.migrations) > 0


@pytest.mark.parametrize("victim", ["coordinator-0", "fast-1", "slow-0"])
def test_whoever_dies_while_instances_come_and_go_costs_no_request(victim: str) -> None:
    outcome = run(
        {"at_s": 3.0, "count": 2, "shape": "h200x2"},
        {"at_s": 20.0, "count": 1, "shape": "l40s"},
        faults=[{"at_s": at_s, "kind": "kill", "target": victim} for at_s in (7.0, 20.2)],
    )
    assert outcome.outcomes == {"completed": 240}
    assert all(answer.startswith("accepted") for answer in outcome.answers), outcome.answers


def test_a_started_instance_has_the_role_that_was_ordered_and_flips_come_one_after_the_other() -> None:
    outcome = run(
        {"at_s": 3.0, "count": 1, "role": "decode"},
        {"at_s": 12.0, "instance": "fast-0", "role": "prefill"},
        {"at_s": 14.0, "instance": "slow-0", "role": "decode", "wait": False},
        {"at_s": 21.0, "instance": "slow-0", "role": "decode", "wait": False},
        {"at_s": 30.0, "instance": "slow-0", "role": "decode"},
    )
    assert outcome.outcomes == {"completed": 240}
    assert outcome.answers[0] == "accepted: slow-2 begins"
    assert outcome.answers[1] == "accepted: fast-0 will be prefill"
    assert outcome.answers[2] == "flip_open: fast-0 is on its way to prefill"
    assert outcome.answers[3].startswith("flipped_lately: another one of its stage was flipped")
    assert outcome.answers[4].startswith("accepted: slow-0 will be decode")
