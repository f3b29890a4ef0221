"""Clusters that the options of `millrace up` amount to, and `millrace cluster show`."""

import argparse
from pathlib import Path

import pytest
from millrace.cli.__main__ import main
from millrace.cli.cluster_flags import add_cluster_options, cluster_of
from millrace.cli.errors import CliError
from millrace.cluster.reading import parse_cluster
from millrace.cluster.spec import ClusterSpec
from millrace.cluster.toml_text import cluster_toml
from millrace.cluster.workers import workers_of
from millrace.supervision.service_fields import migrator_fields, worker_settings_of

from services.migrator.config import ReplicaConfig


def cluster(*words: str, cores: int = 2) -> ClusterSpec:
    parser = argparse.ArgumentParser()
    add_cluster_options(parser)
    return cluster_of(parser.parse_args(words), cores)


def instances(spec: ClusterSpec) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for slot in workers_of(spec):
        found.setdefault(slot.model.name, []).extend(slot.instances)
    return found


@pytest.mark.parametrize(
    ("words", "cores", "counts"),
    [
        ([], 1, {"millrace-mini": 1}),
        ([], 2, {"millrace-mini": 2}),
        ([], 16, {"millrace-mini": 4}),
        (["--instances", "6"], 2, {"millrace-mini": 6}),
        (["--engine", "modelled"], 2, {"millrace-mini": 8}),
        (["--models", "nano,micro,mini"], 2, {"millrace-nano": 1, "millrace-micro": 1, "millrace-mini": 1}),
        (["--models", "nano,mini", "--instances", "5"], 2, {"millrace-nano": 3, "millrace-mini": 2}),
        (["--model", "nano", "--served-name", "n"], 1, {"n": 1}),
    ],
)
def test_engines_are_one_per_core_and_divided_among_models(
    words: list[str], cores: int, counts: dict[str, int]
) -> None:
    assert {model: len(names) for model, names in instances(cluster(*words, cores=cores)).items()} == counts


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache with one repository, Qwen/Qwen3-0.6B, as `hf download` leaves it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--Qwen--Qwen3-0.6B"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"max_position_embeddings": 4096}')
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    return snapshot


def test_a_cached_repository_is_a_model_by_its_name_also_in_a_file(hub: Path, tmp_path: Path) -> None:
    (model,) = cluster("--model", "Qwen/Qwen3-0.6B", "--instances", "1").models
    assert (model.name, model.path) == ("Qwen/Qwen3-0.6B", str(hub))
    file = tmp_path / "c.toml"
    file.write_text('[[models]]\nname = "q"\npath = "Qwen/Qwen3-0.6B"\n')
    (model,) = cluster("--cluster", str(file)).models
    assert model.path == str(hub)


def test_a_repository_that_is_not_cached_is_refused_with_the_way_to_get_it_and_its_terms(hub: Path) -> None:
    with pytest.raises(CliError, match=r"nothing is downloaded at a start: `hf download Qwen/Qwen3-8B` first"):
        cluster("--model", "Qwen/Qwen3-8B")
    with pytest.raises(CliError, match=r"terms at https://huggingface.co/meta/Llama and run `hf auth login` before"):
        cluster("--model", "meta/Llama")


@pytest.mark.parametrize(
    ("weights", "left"),
    [({}, "blobs/a.incomplete"), ({"model.safetensors.index.json": '{"weight_map": {"x": "b.safetensors"}}'}, "")],
)
def test_a_broken_off_download_is_refused_until_it_is_whole(hub: Path, weights: dict[str, str], left: str) -> None:
    for name, text in weights.items():
        (hub / name).write_text(text)
    (hub.parents[1] / "blobs").mkdir()
    if left:
        (hub.parents[1] / left).touch()
    with pytest.raises(CliError, match=r"in part: `hf download Qwen/Qwen3-0.6B` completes it"):
        cluster("--model", "Qwen/Qwen3-0.6B")
    (hub / "b.safetensors").touch()
    assert cluster("--model", "Qwen/Qwen3-0.6B").models[0].path == str(hub)


def test_without_models_beside_the_code_the_ways_to_give_one_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cluster.model_folders._SHIPPED", Path("/nowhere"))
    with pytest.raises(CliError, match=r"no model 'millrace-mini': give a folder with config.json, or an owner/name"):
        cluster("--engine", "modelled")


def test_stages_divide_the_lengths_that_the_model_takes() -> None:
    model = cluster("--stages", "2").models[0]
    assert [stage.name for stage in model.stages] == ["s0", "s1"]
    assert model.stages[0].length_max == model.stages[1].length_min
    assert cluster("--stages", "1").models[0].stages == []


def test_spares_are_for_provisioning() -> None:
    (group,) = cluster("--instances", "1", "--provision", "preempt", cores=4).models[0].groups
    assert (group.count, group.spares) == (1, 3)
    (group,) = cluster("--engine", "modelled", "--instances", "2", "--provision", "relief").models[0].groups
    assert (group.count, group.spares) == (2, 2)
    (group,) = cluster("--instances", "1", "--instances-max", "3").models[0].groups
    assert (group.count, group.spares) == (1, 2)


def test_options_and_the_file_that_they_amount_to_are_one_cluster() -> None:
    spec = cluster(
        *("--engine", "modelled", "--models", "nano,mini", "--processes", "4", "--policy", "round_robin"),
        *("--set", 'worker={"seed": 3}', "--set", "worker-1.seed=4", "--roles", "worker-0-0=prefill"),
        *("--set", "telemetry.log_level=debug", "--ingresses", "2", "--set", "services.predictors=0"),
        *("--port", "9000", "--set", "services.migrators=false", "--set", "services.hosted_instances_max=0"),
    )
    assert parse_cluster(cluster_toml(spec)) == spec
    assert (spec.services.ingresses, spec.services.predictors, spec.services.migrators) == (2, 0, False)
    assert spec.services.hosted_instances_max == 0
    assert (spec.api.port, spec.telemetry.log_level, spec.policies.dispatch.name) == (9000, "debug", "round_robin")
    assert spec.settings.coordinator == {"roles": {"worker-0-0": "prefill"}}
    assert spec.settings.workers == {"worker-1": {"seed": 4}}


def test_replicas_are_switched_on_at_workers_and_migrators_alike() -> None:
    spec = cluster("--instances", "2", "--kv-replicas", "--set", "worker.migration.leases_max=5")
    assert parse_cluster(cluster_toml(spec)) == spec
    fields = migrator_fields(spec, ["worker-0"])["replicas"]
    assert ReplicaConfig(**fields).enabled
    (first, *_) = workers_of(spec)
    migration = worker_settings_of(spec, first)["migration"]
    assert migration == {"replicas": {"memory_share": 0.25}, "leases_max": 5}
    off = cluster("--instances", "2")
    assert "replicas" not in migrator_fields(off, ["worker-0"])
    assert not worker_settings_of(off, workers_of(off)[0])


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--instances", "0"], "--instances 0: at least one per model, 1"),
        (["--instances", "3000"], "models[0].groups[0].count: 3000, must be between 1 and 2000"),
        (["--instances", "3", "--instances-max", "2"], "--instances-max 2: at least the 3 at the start"),
        (["--model", "none-such"], "no model 'none-such'"),
        (["--models", "nano,mini", "--served-name", "x"], "--served-name: several models"),
        (["--stages", "3"], "models[0].stages: 3 stages for 2 instances"),
        (["--stages", "0"], "--stages 0: at least 1"),
        (["--stages", "900", "--instances", "900"], "--stages 900: 900 stages do not fit into a context of"),
        (["--provision", "prempt"], "policies.provisioning.name: 'prempt' is none of"),
        (["--set", "worker-7.seed=1"], "--set worker-7.seed=1: there is no worker-7 (did you mean `worker-1`?)"),
        (["--set", "api.prot=9"], "--set: api: Object contains unknown field `prot` (did you mean `port`?)"),
        (["--set", "worker"], "--set worker: must be key=value"),
        (["--set", "models.3.name=x"], "--set models.3.name=x: there is no 3"),
        (["--engine", "modelled", "--processes", "9"], "--processes 9: between 1 and the 8 engines"),
        (["--roles", "worker-0=judge"], "--roles: 'worker-0=judge' is not INSTANCE=ROLE"),
        (["--roles", "worker-7=prefill"], "--roles: no instance worker-7; there are worker-0, worker-1"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_starts(words: list[str], refusal: str) -> None:
    with pytest.raises(CliError) as refused:
        cluster(*words)
    assert refusal in str(refused.value)


FILE = '[[models]]\nname = "n"\npath = "nano"\n[[models.groups]]\nengine = "modelled"\ncount = 3\n[api]\nport = 8001\n'


def test_a_file_is_a_cluster_and_the_machine_s_options_lie_over_it(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE)
    spec = cluster("--cluster", str(file))
    assert (instances(spec), spec.api.port) == ({"n": ["worker-0-0", "worker-0-1", "worker-0-2"]}, 8001)
    assert cluster("--cluster", str(file), "--port", "8002").api.port == 8002
    assert cluster("--cluster", str(file), "--set", "ingress.tagging.mode=never").settings.ingress == {
        "tagging": {"mode": "never"}
    }
    with pytest.raises(CliError, match=r"--instances: not together with --cluster; set it in .*cluster.toml"):
        cluster("--cluster", str(file), "--instances", "2")


def test_cluster_show_prints_a_file_checked_and_with_its_models_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE)
    assert main(["cluster", "show", str(file)]) == 0
    shown = parse_cluster(capsys.readouterr().out)
    assert Path(shown.models[0].path).name == "millrace-nano"
    file.write_text(FILE + "[services]\nbrokerz = 1\n")
    assert main(["cluster", "show", str(file)]) == 1
    assert "cluster.toml: services: Object contains unknown field `brokerz`" in capsys.readouterr().err
