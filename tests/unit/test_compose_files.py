"""The files of the container deployment agree with each other and with the code.

Bringing it up is `./task test:compose`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from millrace.actor.config import BusConfig, load_config
from millrace.contracts.plan import InstanceRole
from prometheus_client import CollectorRegistry

from compose import prepare
from services.broker.config import BrokerConfig
from services.coordinator.config import CoordinatorConfig
from services.ingress.config import IngressConfig
from services.judge.config import JudgeConfig
from services.migrator.config import MigratorConfig
from services.predictor.config import PredictorConfig
from services.supervisor.compose_host import ComposeHostConfig
from services.tagger.config import TaggerConfig
from services.worker.config import WorkerConfig, WorkerLimits
from tests.unit import metrics_table

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"

#: Prometheus's own, and those that its client library adds to every process.
FOREIGN = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}


@pytest.fixture(scope="module")
def dashboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard", COMPOSE / "grafana" / "dashboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compose() -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


def _templates() -> dict[str, dict[str, Any]]:
    """Of a worker and its migrator."""
    return yaml.safe_load((COMPOSE / "worker.yaml").read_text())["services"]


def test_the_dashboard_is_what_its_table_says(dashboard: ModuleType) -> None:
    drawn = json.loads((COMPOSE / "grafana" / "dashboards" / "millrace.json").read_text())
    assert drawn == dashboard.dashboard()


def test_every_query_asks_for_metrics_that_exist(dashboard: ModuleType) -> None:
    rules = yaml.safe_load((COMPOSE / "prometheus" / "alerts.yaml").read_text())
    queries = dashboard.queries() + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    name = re.compile(r"\b(millrace_\w+|up|process_\w+)\b(?=[\[{ )]|$)")
    asked = {found for query in queries for found in name.findall(query)}
    assert len(asked) > 20
    registry, known = CollectorRegistry(), set(FOREIGN)
    for _, register in metrics_table.SECTIONS:
        register(registry)
    for family in registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        known |= {family.name + suffix for suffix in suffixes}
    assert asked - known == set()


def test_no_panel_divides_by_a_rate_that_may_be_zero(dashboard: ModuleType) -> None:
    divided = [query for query in dashboard.queries() if " / " in query]
    assert len(divided) >= 2
    for query in divided:
        divisor = query.partition(" / ")[2]
        assert divisor == "millrace_worker_blocks_total" or divisor.endswith(" > 0)) or vector(0)"), query


def test_no_secret_stands_in_the_compose_files() -> None:
    for file in ("compose.yaml", "worker.yaml"):
        text = (COMPOSE / file).read_text()
        assert not re.search(r"(?i)(password|token|secret)\s*[:=]\s*[\"']?[A-Za-z0-9+/_-]{12,}", text), file
    services = _compose()["services"].values()
    passwords = [value for service in services for value in service.get("environment", {}).values()]
    assert all(str(value).startswith("/run/secrets/") or value == "false" for value in passwords)


def test_everything_runs_without_root_or_capabilities_and_within_bounds() -> None:
    services = _compose()["services"] | _templates()
    for name, service in services.items():
        assert service["user"].split(":")[0] not in ("", "0", "root"), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"]["max-size"], name
        assert service["restart"] in ("unless-stopped", "on-failure"), name
        # Grafana keeps its plugins and its log beside its data; it is not run here, so it is not said to do without.
        assert service.get("read_only") or name == "grafana", name
        if name != "worker":  # prepare.py gives each worker its own
            assert {"limits", "reservations"} <= set(service["deploy"]["resources"]), name


def test_every_folder_and_target_that_is_named_exists() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    for service in (_compose()["services"] | _templates()).values():
        if build := service.get("build"):
            assert (COMPOSE / build["context"] / build["dockerfile"]).resolve() == COMPOSE / "Dockerfile"
            assert build["target"] in stages
        for volume in service.get("volumes", []):
            if str(volume).startswith("."):
                assert (COMPOSE / volume.split(":")[0]).exists(), volume


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    """Of each stage its lines, from the name of its base on."""
    stages = re.split(r"^FROM ", (COMPOSE / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    return {stage.split()[2]: stage for stage in stages}


@pytest.mark.parametrize("image", ["control", "worker"])
def test_each_image_has_the_files_and_compiled_parts_of_its_package(images: dict[str, str], image: str) -> None:
    (builder,) = re.findall(r"COPY --from=(\S+) /build/wheels", images[image])
    assert images[builder].split()[0] == images[image].split()[0] == "${BASE_IMAGE}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", images[image], re.MULTILINE)).split()
    assert {project["readme"], *project["license-files"]} <= set(copied)


def test_what_the_images_copy_is_let_through_to_the_build() -> None:
    let_through = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source
        assert any(source == name or source.startswith(f"{name}/") for name in let_through), source


def test_only_the_api_is_open_to_other_machines() -> None:
    ports = [(name, port) for name, service in _compose()["services"].items() for port in service.get("ports", [])]
    assert [name for name, port in ports if not port.startswith("127.0.0.1:")] == ["ingress"]


def _prepare(out: Path, *options: str) -> Path:
    model = out / "some-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "config.json").chmod(0o644)
    folder = out / "generated"
    assert prepare.main([*options, "--model", str(model), "--out", str(folder)]) == 0
    return folder


def _resolved(folder: Path, *profiles: str) -> dict[str, Any]:
    """Return the configuration that compose makes of all files together."""
    program = str(Path(sys.executable).parent / "docker-compose")
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    command = [program, "--env-file", str(folder / ".env"), *chosen, "config", "--format", "json"]
    done = subprocess.run(command, cwd=COMPOSE, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of two CPU workers that trade, with keys and a setting, and its services."""
    out = tmp_path_factory.mktemp("cpus")
    (out / "some-keys.toml").write_text("")
    options = ["--keys", str(out / "some-keys.toml"), "--set", "worker.max_num_seqs=7", "--trading", "delay"]
    folder = _prepare(out, "--cpus", "2", *options)
    return folder, _resolved(folder, "cpu")["services"]


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _resolved(_prepare(tmp_path_factory.mktemp("gpus"), "--gpus", "2"), "gpu")["services"]


def test_a_service_that_still_loads_hears_the_order_to_stop(
    on_cpus: tuple[Path, dict[str, Any]], on_gpus: dict[str, Any]
) -> None:
    """The kernel drops a SIGTERM for process 1 of a pid namespace that has no handler for it."""
    for services in (on_cpus[1], on_gpus):
        ours = {name: service for name, service in services.items() if "build" in service}
        assert len(ours) >= 8
        for name, service in ours.items():
            assert bool(service.get("init")) != ("pid" in service), name


def test_gpu_workers_share_the_namespaces_that_cuda_needs_and_no_other_service_does(on_gpus: dict[str, Any]) -> None:
    inside = {name for name, service in on_gpus.items() if service.get("pid") == "service:namespaces"}
    assert inside == {"worker-0", "worker-1"}
    assert all(on_gpus[name]["ipc"] == "service:namespaces" for name in inside)
    assert all("namespaces" in on_gpus[name]["depends_on"] for name in inside)
    assert on_gpus["namespaces"]["ipc"] == "shareable"
    assert not any(service.get("pid") == "host" or service.get("ipc") == "host" for service in on_gpus.values())


def test_each_worker_has_a_migrator_with_its_broker_and_sockets(on_cpus: tuple[Path, dict[str, Any]]) -> None:
    folder, services = on_cpus
    assert {name for name in services if name.startswith("migrator-")} == {"migrator-0", "migrator-1"}
    for name in ("0", "1"):
        config = load_config(MigratorConfig, folder / f"migrator-{name}.json")
        assert (config.instances, config.bus.user) == ([f"worker-{name}"], "migrator")
        broker = load_config(BrokerConfig, folder / f"broker-{name}.json")
        assert (broker.instances, broker.bus.user, broker.trading.policy) == ([f"worker-{name}"], "broker", "delay")
        files = [f"/run/secrets/migrator-{name}.json", "--broker", f"/run/secrets/broker-{name}.json"]
        assert services[f"migrator-{name}"]["command"] == ["deployment.migrator", "--config", *files]
        worker = load_config(WorkerConfig, folder / f"worker-{name}.json")
        targets = [volume["target"] for volume in services[f"worker-{name}"]["volumes"]]
        assert worker.migration.socket_folder in targets
    seconds = [int(_templates()[name]["stop_grace_period"].rstrip("s")) for name in ("worker", "migrator")]
    assert (WorkerLimits().drain_limit_ms + WorkerLimits().linger_ms) / 1000 < seconds[0] < seconds[1]


def test_every_configuration_is_one_that_its_service_takes(on_cpus: tuple[Path, dict[str, Any]]) -> None:
    folder, services = on_cpus
    assert load_config(TaggerConfig, folder / "tagger.json").bus.servers == ["nats://nats:4222"]
    assert load_config(PredictorConfig, folder / "predictor.json").bus.user == "predictor"
    assert load_config(CoordinatorConfig, folder / "coordinator.json").bus.user == "coordinator"
    assert load_config(BusConfig, folder / "buckets.json").user == "supervisor"
    assert load_config(IngressConfig, folder / "ingress.json").http.keys_file == "/run/secrets/keys.toml"
    assert load_config(WorkerConfig, folder / "worker-0.json").max_num_seqs == 7
    assert {secret["source"] for secret in services["ingress"]["secrets"]} == {"ingress.json", "keys.toml"}


@pytest.mark.parametrize(("gpus", "tensor_parallel"), [(1, 1), (8, 4)])
def test_each_gpu_goes_to_exactly_one_worker(tmp_path: Path, gpus: int, tensor_parallel: int) -> None:
    folder = _prepare(tmp_path, "--gpus", str(gpus), "--tensor-parallel", str(tensor_parallel))
    services = _resolved(folder, "gpu")["services"]
    workers = {name: service for name, service in services.items() if name.startswith("worker-")}
    assert len(workers) == gpus // tensor_parallel
    devices = [worker["deploy"]["resources"]["reservations"]["devices"] for worker in workers.values()]
    assert all(len(asked) == 1 and asked[0]["driver"] == "nvidia" for asked in devices)
    every = [str(gpu) for gpu in range(gpus)]
    assert all(asked[0]["device_ids"] == every for asked in devices)
    visible = [worker["environment"]["CUDA_VISIBLE_DEVICES"].split(",") for worker in workers.values()]
    assert all(sorted(order, key=int) == every for order in visible)
    assert sorted((id for order in visible for id in order[:tensor_parallel]), key=int) == every
    for name, worker in workers.items():
        config = load_config(WorkerConfig, folder / f"{name}.json")
        assert (config.name, config.tensor_parallel_size) == (name, tensor_parallel)
        assert worker["build"]["args"]["ENGINE"] == "gpu"
        assert worker["read_only"] is True


def test_spare_workers_start_by_the_provisioner_alone_and_both_sides_know_the_bound(tmp_path: Path) -> None:
    folder = _prepare(tmp_path, "--cpus", "3", "--spares", "2", "--provision", "relief")
    assert [n for n in _resolved(folder, "cpu")["services"] if n.startswith("worker-")] == ["worker-0"]
    provisioner = load_config(ComposeHostConfig, folder / "provisioner.json")
    assert provisioner.compose[-4:] == ["--profile", "cpu", "--profile", "spare"]
    services = _resolved(folder, "cpu", "spare")["services"]
    assert [services[name]["restart"] for name in provisioner.services] == ["no", "no"]
    assert services["worker-0"]["restart"] == "unless-stopped"
    assert provisioner.services == ["worker-1", "worker-2"]
    assert provisioner.bus.servers == ["nats://127.0.0.1:4222"]
    assert (folder / "provisioner.json").stat().st_mode & 0o077 == 0
    provisioning = load_config(CoordinatorConfig, folder / "coordinator.json").provisioning
    assert (provisioning.strategy, provisioning.hosts) == ("relief", [provisioner.host])
    assert provisioning.parameters == {"instances_min": 1, "instances_max": 3}


CLUSTER = """
name = "two"
[[models]]
name = "big"
path = "big"
groups = [{ name = "wide", device = "h100", tensor_parallel = 2, count = 2 }]
[[models]]
name = "small"
path = "small"
groups = [{ name = "narrow", device = "h100", role = "decode", settings = { max_num_seqs = 5 } }]
[policies.dispatch]
name = "round_robin"
[api]
port = 8100
"""


def _cluster_file(folder: Path, text: str) -> Path:
    for name in ("big", "small"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text("{}")
        (folder / name / "config.json").chmod(0o644)
    file = folder / "cluster.toml"
    file.write_text(text)
    return file


def _rendered(folder: Path, text: str) -> Path:
    out = folder / "generated"
    assert prepare.main(["--cluster", str(_cluster_file(folder, text)), "--out", str(out)]) == 0
    return out


def test_a_cluster_s_file_is_rendered_to_containers(tmp_path: Path) -> None:
    folder = _rendered(tmp_path, CLUSTER + "[nats]\nservers = 3")
    services = _resolved(folder, "gpu")["services"]
    workers = ("wide-0", "wide-1", "narrow-0")
    devices = [services[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in workers]
    assert devices == ["0,1,2,3,4", "2,3,0,1,4", "4,0,1,2,3"]
    narrow = load_config(WorkerConfig, folder / "narrow-0.json")
    assert (narrow.model, narrow.model_path, narrow.max_num_seqs) == ("small", "/models/1", 5)
    for name, target, model in (("narrow-0", "/models/1", "small"), ("ingress", "/model", "big")):
        assert (str(tmp_path / model), target) in [
            (each["source"], each["target"]) for each in services[name]["volumes"]
        ]
    ingress = load_config(IngressConfig, folder / "ingress.json")
    assert [(model.name, model.path) for model in ingress.models] == [("big", "/model"), ("small", "/models/1")]
    assert (ingress.dispatch.policy, ingress.bus.cluster) == ("round_robin", "two")
    assert services["ingress"]["ports"][0]["published"] == "8100"
    assert load_config(CoordinatorConfig, folder / "coordinator.json").roles == {"narrow-0": InstanceRole.DECODE}
    hosts = [name for name in services if name.startswith("nats")]
    assert [services[host]["ports"][0]["published"] for host in hosts] == ["4222", "4223", "4224"]
    assert list(services["buckets"]["depends_on"]) == hosts
    assert ingress.bus.servers == [f"nats://{host}:4222" for host in hosts]
    assert re.findall("@([a-z0-9-]+):6222", (folder / "nats-1.conf").read_text()) == ["nats", "nats-2"]


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ("[services]\ningresses = 2", "services.ingresses: 2; containers are made for one"),
        ('[[extra_services]]\nname = "c"\nmodule = "m"\nrole = "observer"', "extra_services: c; the images hold"),
        ('[cascade]\ntiers = ["small"]\nlatency_s = 2\nsample = "s.jsonl"', "cascade.sample: containers do not plan"),
        ('[[models]]\nname = "c"\npath = "nano"', "GPUs and CPUs in one deployment"),
        ("[services]\nbrokerz = 2", "unknown field `brokerz`"),
    ],
)
def test_a_cluster_that_containers_cannot_be_is_refused_by_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, wrong: str
) -> None:
    with pytest.raises(SystemExit):
        _rendered(tmp_path, CLUSTER + more)
    assert wrong in capsys.readouterr().err


def test_a_cascade_is_rendered_with_its_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = '[cascade]\ntiers = ["small", "big"]\nthresholds = [40]\njudge = "llm"\nparameters = { model = "big" }\n'
    folder = _rendered(tmp_path, CLUSTER + table)
    assert "--profile gpu --profile cascade up" in capsys.readouterr().out
    (scraped,) = json.loads((folder / "targets" / "judge.json").read_text())
    assert scraped == {"targets": ["judge:9100"], "labels": {"role": "judge"}}
    judge = load_config(JudgeConfig, folder / "judge.json")
    assert (judge.url, judge.model) == ("http://ingress:8000/v1", "big")
    (cascade,) = load_config(IngressConfig, folder / "ingress.json").cascades
    assert [(tier.model, tier.threshold) for tier in cascade.tiers] == [("small", 40.0), ("big", 0.0)]
    (planned,) = load_config(CoordinatorConfig, folder / "coordinator.json").cascades
    assert [(tier.model, tier.instances) for tier in planned.tiers] == [("small", 1), ("big", 2)]
    assert "judge" not in _resolved(folder, "gpu")["services"]
    judging = _resolved(folder, "gpu", "cascade")["services"]["judge"]
    assert judging["command"] == ["services.judge", "--config", "/run/secrets/judge.json"]


def test_a_judge_by_confidence_needs_no_container_and_its_profile_works_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compose refuses to start a service whose secret has no file."""
    folder = _rendered(tmp_path, CLUSTER + '[cascade]\ntiers = ["small", "big"]\n')
    assert "--profile gpu up" in capsys.readouterr().out
    assert json.loads((folder / "targets" / "judge.json").read_text()) == []
    content = _resolved(folder, "gpu", "cascade")
    assert "judge" in content["services"]
    assert Path(content["secrets"]["judge.json"]["file"]).is_file()
    load_config(JudgeConfig, folder / "judge.json")
    assert {"judge", "buckets", "nats"} <= set(_resolved(folder, "cascade")["services"])


def test_passwords_stay_when_it_is_prepared_again_and_are_nobody_elses_to_read(tmp_path: Path) -> None:
    folder = _prepare(tmp_path / "once", "--cpus", "1")
    first = json.loads((folder / "passwords.json").read_text())
    assert len(set(first.values())) == len(first) > 5
    assert all(password.isalnum() for password in first.values()), "none can be taken for an option"
    again = ["--cpus", "2", "--model", str(tmp_path / "once" / "some-model"), "--out", str(folder)]
    assert prepare.main(again) == 0
    assert json.loads((folder / "passwords.json").read_text()) == first
    assert prepare.main([*again, "--new-passwords"]) == 0
    assert not set(json.loads((folder / "passwords.json").read_text()).values()) & set(first.values())
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--gpus", "6", "--tensor-parallel", "4"], "cannot be split"),
        (["--cpus", "2", "--tensor-parallel", "2"], "CPU workers have one core each"),
        (["--gpus", "-1"], "at least 1"),
        (["--cpus", "1", "--keys", "/nowhere"], "no such file"),
        (["--cpus", "1", "--set", "wroker.seed=1"], "there is no wroker (did you mean `worker`?)"),
        (["--cpus", "2", "--spares", "2"], "at least one worker"),
        (["--cpus", "2", "--spares", "1", "--provision", "x"], "one of none, preempt, relief"),
        (["--cpus", "2", "--roles", "worker-0"], "'worker-0' is not INSTANCE=ROLE with a role of both, prefill,"),
        (["--cpus", "2", "--roles", "worker-3=decode"], "worker-3 is none of worker-0, worker-1"),
    ],
)
def test_wrong_options_are_refused_by_name_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], wrong: str
) -> None:
    with pytest.raises(SystemExit):
        _prepare(tmp_path, *options)
    assert wrong in capsys.readouterr().err
    assert not (tmp_path / "generated").exists()


def test_a_cached_snapshot_is_mounted_with_the_files_that_it_links_to(tmp_path: Path) -> None:
    repository, out = tmp_path / "models--some--model", tmp_path / "generated"
    for folder in ("blobs", "snapshots/5678"):
        (repository / folder).mkdir(parents=True)
    (repository / "blobs" / "1234").write_text("{}")
    snapshot = repository / "snapshots" / "5678"
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    words = ["--cpus", "1", "--model", str(snapshot), "--served-name", "some", "--out", str(out)]
    assert prepare.main(words) == 0
    assert f"MILLRACE_MODEL_DIR={repository}\n" in (out / ".env").read_text()
    assert load_config(WorkerConfig, out / "worker-0.json").model_path == "/model/snapshots/5678"
    (model,) = load_config(IngressConfig, out / "ingress.json").models
    assert (model.name, model.path) == ("some", "/model/snapshots/5678")


@pytest.mark.parametrize(
    ("closed", "why"),
    [
        *((name, "the containers' user may not read it; chmod -R o+rX {}") for name in (".", "judge", "judge/a.json")),
        ("model.safetensors", "a link out of {}"),
    ],
)
def test_what_the_containers_may_not_read_is_refused_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], closed: str, why: str
) -> None:
    model = tmp_path / "some-model"
    (model / "judge").mkdir(parents=True)
    for name in ("config.json", "judge/a.json", "../weights"):
        (model / name).write_text("{}")
    if closed == "model.safetensors":
        (model / closed).symlink_to("../weights")
    else:
        (model / closed).chmod(0o700)
    with pytest.raises(SystemExit):
        prepare.main(["--cpus", "1", "--model", str(model), "--out", str(tmp_path / "out")])
    assert f"{model / closed}: {why.format(model)}" in capsys.readouterr().err
