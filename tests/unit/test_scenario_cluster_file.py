"""A scenario whose cluster is the one that `millrace up --cluster` starts."""

from pathlib import Path

import pytest
from millrace.enginemodel.parameters import EngineParameters

from simulator.scenarios.reading import ScenarioError, read_scenario

CLUSTER = """
[[models]]
name = "small"
path = "nano"

[[models.groups]]
count = 3
spares = 2
device = "h100"
tensor_parallel = 2
settings = { max_num_seqs = 32, max_num_batched_tokens = 512, kv_blocks = 900, max_model_len = 1024, block_size = 32 }

[[models]]
name = "large"
path = "mini"

[[models.groups]]
count = 2
engine = "modelled"
step_time = "a100-llama-3-8b"
settings.max_num_seqs = 7

[services]
ingresses = 2
predictors = 0

[policies.dispatch]
name = "round_robin"
"""


def _scenario(tmp_path: Path, cluster: str = CLUSTER, more: str = "") -> Path:
    (tmp_path / "cluster.toml").write_text(cluster)
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(f'name = "x"\n[cluster]\nfile = "cluster.toml"\n{more}')
    return scenario


def test_groups_services_and_the_dispatch_policy_are_those_of_the_file(tmp_path: Path) -> None:
    spec = read_scenario(_scenario(tmp_path))
    small, large = spec.cluster.groups
    assert (small.name, small.model, small.instances, small.spares) == ("worker", "small", 3, 2)
    assert (small.shape, small.step_time) == ("h100-tp2", "cpu-500k")
    assert small.engine == EngineParameters(
        max_sequences=32, token_budget=512, blocks_total=900, max_model_len=1024, block_size=32
    )
    assert (large.name, large.model, large.instances, large.step_time) == ("worker1", "large", 2, "a100-llama-3-8b")
    assert large.engine == EngineParameters(max_sequences=7)
    assert (spec.cluster.ingresses, spec.cluster.predictors, spec.dispatch.policy) == (2, 1, "round_robin")


def test_what_the_scenario_says_itself_wins_and_settings_reach_the_files_groups(tmp_path: Path) -> None:
    path = _scenario(tmp_path, more='ingresses = 3\n[dispatch]\npolicy = "random"\n')
    spec = read_scenario(path, ["cluster.groups.1.instances=9"])
    assert (spec.cluster.ingresses, spec.dispatch.policy) == (3, "random")
    assert [group.instances for group in spec.cluster.groups] == [3, 9]


def test_a_setting_puts_the_file_in_place_of_a_scenarios_groups(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    mixed = Path(__file__).parents[2] / "examples" / "scenarios" / "mixed.toml"
    spec = read_scenario(mixed, [f"cluster.file={tmp_path / 'cluster.toml'}", "cluster.groups.0.instances=5"])
    assert [(group.model, group.instances) for group in spec.cluster.groups] == [("small", 5), ("large", 2)]
    assert spec.dispatch.policy == "forecast", "the scenario's own"


def test_trading_roles_and_replicas_are_those_of_the_file(tmp_path: Path) -> None:
    cluster = CLUSTER.replace("spares = 2", 'role = "prefill"')
    more = '[policies.trading]\nname = "delay"\n[kv_replicas]\nenabled = true\n'
    spec = read_scenario(_scenario(tmp_path, cluster + more))
    assert spec.trading.policy == "delay"
    assert spec.migration.on
    assert spec.migration.replicas.enabled
    assert spec.migration.roles == {f"worker-{number}": "prefill" for number in range(3)}


@pytest.mark.parametrize(
    ("cluster", "more", "complaint"),
    [
        (CLUSTER, '[[cluster.groups]]\nname = "a"\n', "cluster.groups: not together with cluster.file"),
        (f'{CLUSTER}\n[cascade]\ntiers = ["small", "large"]\nthresholds = [40]\n', "", "the cluster has a cascade"),
        (CLUSTER.replace("kv_blocks = 900", "kv_blocks = 2"), "", "group worker of model small: blocks_total"),
        (CLUSTER.replace('"nano"', '"no-such-model"'), "", r"models\[0\].path: no model"),
        ("models = 3", "", "cluster.toml: models"),
    ],
)
def test_what_would_be_left_out_or_is_wrong_is_refused(tmp_path: Path, cluster: str, more: str, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        read_scenario(_scenario(tmp_path, cluster, more))
