"""Manifests for Kubernetes agree with each other and with the services that read their files."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from millrace.actor.config import BusConfig, load_config

from compose import kubernetes
from deployment.config_check import SERVICES
from services.page.config import PageConfig
from services.worker.config import WorkerConfig, WorkerLimits

CLUSTER = """
name = "k"
[[models]]
name = "big"
path = "big"
groups = [{ name = "wide", device = "h100", tensor_parallel = 2, count = 2 }]
[[models]]
name = "small"
path = "small"
groups = [{ name = "narrow", device = "h100", role = "decode" }]
[services]
ingresses = 2
coordinators = 2
[nats]
servers = 3
[api]
keys = "keys.toml"
"""

KINDS = {**SERVICES, "page": PageConfig, "buckets": BusConfig, "wide": WorkerConfig, "narrow": WorkerConfig}

Objects = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("big", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "config.json").chmod(0o644)
    (tmp_path / "keys.toml").write_text("# {{ .Values }}")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def written(folder: Path, *options: str) -> Objects:
    words = ["--cluster", str(folder / "cluster.toml"), "--out", str(folder / "out"), *options]
    assert kubernetes.main(words) == 0
    found = list(yaml.safe_load_all((folder / "out" / "manifests.yaml").read_text()))
    objects = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(objects) == len(found)
    return objects


def pods(objects: Objects) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(set, pod, its spec) of every pod, that of a job too."""
    for (kind, name), each in objects.items():
        if kind == "StatefulSet":
            for n in range(each["spec"]["replicas"]):
                yield name, f"{name}-{n}", each["spec"]["template"]["spec"]
        if kind == "Job":
            yield "buckets", name, each["spec"]["template"]["spec"]


def rendered(folder: Path, values: dict[str, Any]) -> Objects:
    helm = pytest.importorskip("helm_python", reason="./task check:kubernetes installs it")
    with helm.Chart.load(folder / "chart") as chart:
        found = [each for text in chart.render(values).values() for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def words_of(pod: str, container: dict[str, Any]) -> list[str]:
    return [word.replace("$(POD_NAME)", pod) for word in [*container.get("command", []), *container["args"]]]


def files_of(words: list[str]) -> list[str]:
    return [word.removeprefix("/run/secrets/") for word in words if word.startswith("/run/secrets/")]


def kind_of(file: str) -> type[msgspec.Struct]:
    stem = file.removesuffix(".json")
    return KINDS[stem.rpartition(".")[2] if "." in stem else stem.rpartition("-")[0] or stem]


def test_every_container_s_files_are_in_its_secret_and_its_service_takes_them(folder: Path, tmp_path: Path) -> None:
    objects, seen = written(folder, "--models-claim", "models"), set()
    for name, pod, spec in pods(objects):
        secret = objects["Secret", name]["stringData"]
        assert {"name": "files", "secret": {"secretName": name, "defaultMode": 0o440}} in spec["volumes"]
        volumes = {volume["name"] for volume in spec["volumes"]} | ({"data"} if name == "nats" else set())
        ports: list[int] = []
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            ports += [port["containerPort"] for port in container["ports"]]
            words = words_of(pod, container)
            name_given = words[words.index("--name") + 1] if "--name" in words else ""
            assert files_of(words)
            for file in files_of(words):
                seen.add(file)
                if not file.endswith(".json"):
                    assert file in secret
                    continue
                (tmp_path / file).write_text(secret[file])
                config: Any = load_config(kind_of(file), tmp_path / file, name=name_given)
                if name != "buckets" and file.count(".") == 1:
                    assert config.name == pod
                if "broker" not in file and name != "buckets":
                    assert config.telemetry.metrics_port in [port["containerPort"] for port in container["ports"]]
        assert len(set(ports)) == len(ports)
    unused = {(name, file) for (kind, name), each in objects.items() if kind == "Secret" for file in each["stringData"]}
    assert {file for _, file in unused} - seen == {"keys.toml"}


def test_passwords_stand_in_secrets_alone_and_stay_when_it_runs_again(folder: Path) -> None:
    objects = written(folder)
    assert (folder / "out" / "manifests.yaml").stat().st_mode & 0o077 == 0
    passwords = msgspec.json.decode((folder / "out" / "passwords.json").read_bytes(), type=dict[str, str]).values()
    rest = yaml.safe_dump([each for (kind, _), each in objects.items() if kind != "Secret"])
    assert not [password for password in passwords if password in rest]
    assert written(folder) == objects
    assert written(folder, "--new-passwords") != objects


def test_only_the_pods_whose_files_change_roll(folder: Path) -> None:
    before, after = written(folder), written(folder, "--set", "coordinator.recording=/tmp/r")
    changed = {name for (kind, name), each in after.items() if kind == "StatefulSet" and each != before[kind, name]}
    assert changed == {"coordinator"}


def test_instances_get_gpus_a_migrator_time_to_drain_and_models_from_the_claim_or_the_node(folder: Path) -> None:
    objects = written(folder)
    spec = objects["StatefulSet", "wide"]["spec"]["template"]["spec"]
    (migrator,) = spec["initContainers"]
    assert (migrator["name"], migrator["restartPolicy"]) == ("migrator", "Always")
    limits = WorkerLimits()
    assert spec["terminationGracePeriodSeconds"] * 1000 > 2 * (limits.drain_limit_ms + limits.linger_ms)
    for name, gpus, path in (("wide", 2, "big"), ("narrow", 1, "small")):
        spec = objects["StatefulSet", name]["spec"]["template"]["spec"]
        assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": gpus}
        assert [v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v] == [str(folder / path)]
    ingress = written(folder, "--models-claim", "shared")["StatefulSet", "ingress"]["spec"]["template"]["spec"]
    mounted = {m["mountPath"]: m["subPath"] for m in ingress["containers"][0]["volumeMounts"] if m["name"] == "models"}
    assert mounted == {"/model": "big", "/models/1": "small"}


def test_three_nats_servers_know_each_other_and_keep_each_bucket_together(folder: Path) -> None:
    objects = written(folder)
    files = objects["Secret", "nats"]["stringData"]
    assert sorted(files) == ["nats-0.conf", "nats-1.conf", "nats-2.conf"]
    assert "@nats-0.nats:6222" not in files["nats-0.conf"]
    assert all(f"@nats-{n}.nats:6222" in files["nats-0.conf"] for n in (1, 2))
    ((job,),) = (e["spec"]["template"]["spec"]["containers"] for (kind, _), e in objects.items() if kind == "Job")
    assert job["args"][-2:] == ["--replicas", "3"]
    bus = msgspec.json.decode(objects["Secret", "tagger"]["stringData"]["tagger.json"])["bus"]
    assert bus["servers"] == [f"nats://nats-{n}.nats:4222" for n in range(3)]


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("count = 2", "count = 2, spares = 1", "models[0].groups[0].spares: 1"),
        ("count = 2", 'names = ["a"]', "models[0].groups[0].names: pods are numbered"),
        ('name = "narrow"', 'name = "wide"', "models[].groups[].name: each group is a StatefulSet"),
        ('name = "narrow"', 'name = "nats"', "models[].groups[].name: each group is a StatefulSet"),
        ('name = "narrow"', 'name = "Na_rrow"', "models[].groups[].name: Na_rrow; a pod's name has small letters"),
        ("coordinators = 2", "predictors = 2", "services.predictors: 2"),
        ('path = "big"', 'path = "nowhere"', "models[0].path: no model"),
    ],
)
def test_a_cluster_that_pods_cannot_be_is_refused_by_its_field(
    folder: Path, old: str, new: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in CLUSTER
    (folder / "cluster.toml").write_text(CLUSTER.replace(old, new, 1))
    with pytest.raises(SystemExit):
        kubernetes.main(["--cluster", str(folder / "cluster.toml"), "--out", str(folder / "out")])
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_objects_are_what_the_schemas_of_kubernetes_say(folder: Path, version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="./task check:kubernetes installs it")
    objects = written(folder, "--models-claim", "models") | written(folder)
    for each in objects.values():
        schemas.validate(each, version, strict=True)
    wrong = objects["StatefulSet", "ingress"]
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, version, strict=True)


def test_a_chart_renders_what_the_manifests_say_and_each_value_changes_what_it_names(folder: Path) -> None:
    plain = written(folder, "--chart", str(folder / "chart"))
    assert rendered(folder, {}) == plain
    report = importlib.import_module("helm_python").lint(folder / "chart", strict=True, kube_version="v1.37.0")
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]
    assert not [path for path in (folder / "chart").rglob("*.yaml") if path.stat().st_mode & 0o077]
    sets = {name for kind, name in plain if kind == "StatefulSet"}
    schemas = pytest.importorskip("kubernetes_validate", reason="./task check:kubernetes installs it")
    for values, kind, names in (
        ({"ingress": {"replicas": 5}}, "StatefulSet", {"ingress"}),
        ({"ingress": {"serviceType": "LoadBalancer"}}, "Service", {"ingress"}),
        ({"wide": {"nodeSelector": {"gpu": "a"}}}, "StatefulSet", {"wide"}),
        ({"nats": {"claim": {"storageClassName": "fast"}}}, "StatefulSet", {"nats"}),
        ({"images": {"worker": "r/w"}}, "StatefulSet", {"wide", "narrow"}),
        ({"imagePullSecrets": [{"name": "r"}]}, "StatefulSet", sets),
        ({"networkPolicy": False}, "NetworkPolicy", {"millrace"}),
        ({"podMonitor": True}, "PodMonitor", {"millrace"}),
    ):
        found = rendered(folder, values)
        changed = {key for key in {*plain, *found} if key[0] != "Job" and plain.get(key) != found.get(key)}
        assert changed == {(kind, name) for name in names}
        assert not [key for key in plain if key[0] == "Job" and key in found]  # a job cannot change
        for key in changed - {("NetworkPolicy", "millrace"), ("PodMonitor", "millrace")}:
            schemas.validate(found[key], "1.37", strict=True)
