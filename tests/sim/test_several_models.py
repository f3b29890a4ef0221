"""A scenario with two models: each request goes to an instance of its model, each model has a plan of its own."""

from typing import Any

import pytest
from millrace.actor.settings import with_settings
from millrace.enginemodel.coefficients import load_step_time

from simulator.scenarios.load import arrivals, models_of
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import ScenarioOutcome, run_scenario
from simulator.scenarios.spec import Group, ScenarioSpec

COUNT = 200
TABLE: dict[str, Any] = {
    "cluster": {
        "groups": [
            {"name": "a", "model": "small", "instances": 2, "speed": 2.0},
            {"name": "b", "model": "large", "instances": 2, "step_time": "h100-llama-3-8b"},
        ]
    },
    "workload": {
        "count": COUNT,
        "arrivals": {"kind": "poisson", "rate_per_s": 20.0},
        "models": {"small": {"share": 3.0}, "large": {"share": 1.0, "output_scale": 2.0}},
    },
}


def run(*settings: str) -> ScenarioOutcome:
    return run_scenario(scenario_of(with_settings(TABLE, settings)), step_times=load_step_time)


def drawn(spec: ScenarioSpec) -> list[str]:
    return models_of(spec, arrivals(spec.workload, seed=spec.seed, folders=()))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("dispatch.policy=forecast", "migration.on=true"), id="forecasts and migrators"),
        pytest.param(("prediction.kind=tagger", "cluster.ingresses=2"), id="a tagger that learns, two ingresses"),
    ],
)
def test_every_request_is_served_by_an_instance_of_its_model(settings: tuple[str, ...]) -> None:
    outcome = run(*settings)
    assert outcome.outcomes == {"completed": COUNT}
    group = {"small": "a-", "large": "b-"}
    assert [each for each in outcome.finished if not each.instance.startswith(group[each.model])] == []
    models = drawn(outcome.spec)
    assert {each.number: each.model for each in outcome.finished} == dict(enumerate(models))
    assert 0.6 < models.count("small") / COUNT < 0.9


def test_outputs_are_as_long_as_the_model_makes_them() -> None:
    both, same = run(), run("workload.models.large.output_scale=1.0")
    plain = {each.number: each.output_tokens for each in same.finished}
    for each in both.finished:
        assert each.output_tokens == plain[each.number] * (2 if each.model == "large" else 1)


def test_a_model_that_is_killed_leaves_the_other_alone() -> None:
    faults = [{"at_s": 2.0, "kind": "kill", "target": name} for name in ("b-0", "b-1")]
    table = {**TABLE, "faults": faults, "cluster": {**TABLE["cluster"], "restart_s": 3.0}}
    outcome = run_scenario(scenario_of(table), step_times=load_step_time)
    assert outcome.outcomes == {"completed": COUNT}
    assert sum(each.continuations for each in outcome.finished if each.model == "large") > 0
    assert sum(each.continuations for each in outcome.finished if each.model == "small") == 0


def test_without_shares_models_share_equally_and_one_model_gets_all() -> None:
    table = {"cluster": TABLE["cluster"], "workload": {"count": 400}}
    assert 150 < drawn(scenario_of(table)).count("small") < 250
    assert set(drawn(scenario_of({}))) == {"modelled"}


@pytest.mark.parametrize(
    ("group", "hosts"),
    [
        (Group(instances=4), ["", "", "", ""]),
        (Group(instances=4, host="h"), ["h", "h", "h", "h"]),
        (Group(instances=4, instances_per_host=2), ["gpu-host-0", "gpu-host-0", "gpu-host-1", "gpu-host-1"]),
        (Group(instances=3, host="h", instances_per_host=2), ["h-host-0", "h-host-0", "h-host-1"]),
    ],
)
def test_a_group_says_which_instances_share_a_host(group: Group, hosts: list[str]) -> None:
    assert [group.host_of(name) for name in group.names()] == hosts


def moved_in(instances_per_host: int) -> list[int]:
    """Return how long sequences stood still, where four prefill instances hand over to four decode instances."""
    table = {
        "cluster": {"groups": [{"name": "g", "instances": 8, "instances_per_host": instances_per_host}]},
        "migration": {
            "on": True,
            "bandwidth_gbps": 1.0,
            "local_gbps": 400.0,
            "mode": "stop_and_copy",
            "roles": {f"g-{index}": "prefill" if index % 2 == 0 else "decode" for index in range(8)},
        },
        "workload": {
            "count": 60,
            "lengths": {"kind": "log_normal", "prompt_mean": 500.0, "output_mean": 50.0, "prompt_sigma": 0.1},
        },
    }
    outcome = run_scenario(scenario_of(table), step_times=load_step_time)
    return sorted(each.frozen_ns for each in outcome.migrations if each.outcome == "moved")


def test_instances_of_one_host_do_not_use_its_network_card() -> None:
    apart, together = moved_in(1), moved_in(8)
    assert len(apart) > 10
    assert together[len(together) // 2] < apart[len(apart) // 2] / 10
