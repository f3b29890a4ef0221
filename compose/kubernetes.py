"""Writes a cluster's file as manifests for Kubernetes, from the same files that containers get under docker compose.

    python -m compose.kubernetes --cluster cluster.toml --models-claim models
    kubectl apply -f compose/generated/kubernetes/manifests.yaml

Every service is a StatefulSet, ingress too: its name is its identity on the bus, so that two pods of one name would be
taken for a restart, and a pod's own name is the only one that Kubernetes keeps. SIGTERM is what drains: a worker moves
its sequences away through the migrator beside it, which Kubernetes ends after it (a sidecar, Kubernetes 1.29).

Passwords are kept in the folder when it runs again; what has changed since rolls, one pod after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import yaml
from millrace.actor.errors import ConfigError
from millrace.cluster.checks import check_spec
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import read_cluster
from millrace.cluster.settings import with_cluster_settings
from millrace.cluster.spec import ClusterSpec, ModelSpec
from millrace.cluster.workers import WorkerSlot, workers_of

from compose.chart import ChartValues, write_chart, write_private
from compose.containers import broker_of, migrator_of, mount_point
from compose.model_mounts import mount_source
from compose.prepare import GENERATED, kept_passwords, not_for_containers
from compose.service_files import METRICS_PORT, NATS, nats_file, service_files
from deployment.config_check import check_settings
from services.ingress.config import IngressConfig
from services.worker.config import WorkerConfig

SECRETS = "/run/secrets"

#: A migrator shares its worker's network.
MIGRATOR_METRICS_PORT = METRICS_PORT + 1

#: What a pod gets to end in, beside the time of its drain.
GRACE_S = 20

#: A large model takes minutes to load.
LOADING_S = 1200

#: User of the containers (Dockerfile), and what they may not.
USER = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
USER |= {"fsGroupChangePolicy": "OnRootMismatch"}  # a claim with models has many files
CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}

#: Cores and memory by container: asked for, and at most.
CONTROL = ("100m", "96Mi", "1", "512Mi")
CPU_WORKER = ("500m", "1Gi", "1", "6Gi")
RESOURCES = {"ingress": ("500m", "256Mi", "2", "2Gi"), "nats": ("250m", "128Mi", "2", "1Gi")}

#: Size of the volumes in memory: what vLLM's processes share, as under docker compose, and sockets for KV.
SHARED = {"shm": "8Gi", "kv": "16Mi"}

#: Label of every object; where pods of one set go.
PART = {"app.kubernetes.io/part-of": "millrace"}
SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}

#: Names that are taken.
OWN = ("nats", "buckets", "tagger", "predictor", "coordinator", "judge", "page", "ingress", "migrator", "images")

Object = dict[str, Any]
NONE: Mapping[str, Any] = MappingProxyType({})


def main(words: list[str] | None = None) -> int:
    """Writes the manifests; says what to do next."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="a cluster's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="as `millrace up`")
    parser.add_argument("--models-claim", default="", help="claim that holds the models' folders; else the nodes do")
    parser.add_argument("--control-image", default="millrace-control:latest")
    parser.add_argument("--worker-image", default="millrace-worker:latest")
    parser.add_argument("--new-passwords", action="store_true")
    parser.add_argument("--out", type=Path, default=GENERATED / "kubernetes", help="folder for the files")
    parser.add_argument("--chart", type=Path, metavar="FOLDER", help="writes a Helm chart there too, with passwords")
    arguments = parser.parse_args(words)
    try:
        spec = with_model_folders(with_cluster_settings(read_cluster(arguments.cluster), arguments.set))
        check_spec(spec)
        check_settings(spec)
    except ConfigError as error:
        parser.error(str(error))
    if wrong := not_for_containers(spec, several=("ingresses", "coordinators")) or _not_for_kubernetes(spec):
        parser.error(wrong)
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.out.chmod(0o700)
    file = arguments.out / "manifests.yaml"
    images = {"control": arguments.control_image, "worker": arguments.worker_image}
    passwords = kept_passwords(arguments.out, new=arguments.new_passwords)
    claim, plain, marked = arguments.models_claim, ChartValues(), ChartValues(marked=True)
    made, templates = (Manifests(spec, passwords, images, claim, values).objects() for values in (plain, marked))
    objects = [each for each in made if each.pop("when", True)]
    write_private(file, yaml.safe_dump_all(objects, sort_keys=False))
    print(f"kubernetes: {len(objects)} objects for {len(workers_of(spec))} worker(s), with passwords; next:")
    print(f"  kubectl apply -f {file}")
    if arguments.chart:
        write_chart(arguments.chart, templates, marked)
        print(f"or\n  helm install millrace {arguments.chart}")
    return 0


def _not_for_kubernetes(spec: ClusterSpec) -> str:
    """The first field that these manifests cannot have, with the reason; empty for none."""
    for index, model in enumerate(spec.models):
        if model.adapters:
            return f"models[{index}].adapters: their folders are not in the pods"
        for number, group in enumerate(model.groups):
            where = f"models[{index}].groups[{number}]"
            if group.spares:
                return f"{where}.spares: {group.spares}; `kubectl scale` starts and stops pods, not the coordinator"
            if group.names:
                return f"{where}.names: pods are numbered; give name and count"
    names = [group.name for model in spec.models for group in model.groups]
    if len({*names, *OWN}) < len(names) + len(OWN):
        return f"models[].groups[].name: each group is a StatefulSet and has a name of its own, not {', '.join(OWN)}"
    if wrong := [name for name in names if not re.fullmatch("[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", name)]:
        return f"models[].groups[].name: {wrong[0]}; a pod's name has small letters, digits and '-'"
    return ""


class Manifests:
    """Every object of a cluster.

    Args:
        spec: The cluster.
        passwords: By role.
        images: ``control`` and ``worker``.
        claim: PersistentVolumeClaim with the models' folders, each under its own name; empty for folders of the nodes,
            at the same path as here.
        over: What an installer of a chart may change.
    """

    def __init__(
        self, spec: ClusterSpec, passwords: Mapping[str, str], images: Mapping[str, str], claim: str, over: ChartValues
    ) -> None:
        self._spec, self._passwords, self._claim = spec, passwords, claim
        self._values, self._value = over, over.value
        self._images = {name: over.value(f"images/{name}", image) for name, image in images.items()}
        self._nats = [f"nats-{index}" for index in range(spec.nats.servers)]
        servers = tuple(f"nats://{name}.nats:4222" for name in self._nats) if len(self._nats) > 1 else NATS
        self._files = service_files(spec, passwords, otlp=spec.telemetry.otlp, servers=servers)

    def objects(self) -> list[Object]:
        """In any order; one with a key ``when`` only where that is true."""
        spec = self._spec
        counts = {"tagger": 1, "predictor": 1, "coordinator": spec.services.coordinators}
        counts |= {"judge": 1} if spec.cascade is not None and spec.cascade.judge_processes else {}
        groups = groupby(workers_of(spec), key=lambda slot: slot.group.name)
        return [
            *self._servers(),
            *(each for name, count in counts.items() for each in self._service(name, count)),
            *self._service("page", 1, {"http": 8001}),
            _front("page", {"http": 8001}),
            *(each for name, slots in groups for each in self._workers(name, list(slots))),
            *self._ingresses(),
            *self._around(),
            *self._buckets(),
        ]

    def _servers(self) -> list[Object]:
        """Of NATS."""
        ports = {"client": 4222, "route": 6222}
        nats = self._container("nats", ports, {"data": "/data"}, ["-c", f"{SECRETS}/$(POD_NAME).conf"])
        asked = ["python", "-m", "millrace.cli", "probe", "http://127.0.0.1:8222/healthz"]
        nats["command"] = ["nats-server"]
        nats["readinessProbe"] = {"exec": {"command": asked}, "periodSeconds": 10, "timeoutSeconds": 5}
        nats["livenessProbe"] = {"tcpSocket": {"port": "client"}, "periodSeconds": 10, "failureThreshold": 6}
        # Servers find each other before they are ready.
        service = _front("nats", ports, clusterIP="None", publishNotReadyAddresses=True)
        room = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}}
        claims = [{"metadata": {"name": "data"}, "spec": self._value("nats/claim", room)}]
        files = {f"{name}.conf": self._nats_file(name) for name in self._nats}
        return [service, *_set("nats", len(self._nats), self._pod("nats", [nats]), files, claims), _budget("nats")]

    def _buckets(self) -> list[Object]:
        """The job that creates buckets which are not there: services that come first are started again. A job cannot
        change, so that another image makes another one.
        """
        words = ["services.supervisor.buckets", "--config", f"{SECRETS}/buckets.json"]
        buckets = self._container("buckets", words=[*words, "--replicas", str(len(self._nats))])
        pod = self._pod("buckets", [buckets]) | {"restartPolicy": "OnFailure"}
        template = {"metadata": _labels("buckets"), "spec": pod}
        spec = {"backoffLimit": 30, "ttlSecondsAfterFinished": 600, "template": template}
        job = _object("batch/v1", "Job", "buckets", spec=spec)
        job["metadata"]["name"] += f"-{self._values.digest()}"
        return [_secret("buckets", {"buckets.json": self._files["buckets.json"]}), job]

    def _around(self) -> list[Object]:
        """Pods reach each other; from elsewhere the API, the page and metrics are reached, not the bus. Prometheus'
        operator reads the second; without it the annotations of the pods say the same.
        """
        matching = {"matchLabels": PART}
        ports = [{"port": port} for port in (8000, 8001, METRICS_PORT, MIGRATOR_METRICS_PORT)]
        reached = [{"from": [{"podSelector": matching}]}, {"ports": ports}]
        wall = {"podSelector": matching, "policyTypes": ["Ingress"], "ingress": reached}
        read = {"selector": matching, "podMetricsEndpoints": [{"port": "metrics"}, {"port": "migrator"}]}
        return [
            _object("networking.k8s.io/v1", "NetworkPolicy", spec=wall, when=self._value("networkPolicy", True)),
            _object("monitoring.coreos.com/v1", "PodMonitor", spec=read, when=self._value("podMonitor", False)),
        ]

    def _nats_file(self, name: str) -> str:
        routes = ["0.0.0.0:6222", *(f"{each}.nats:6222" for each in self._nats if each != name)]
        several = {"name": name, "routes": tuple(routes)} if len(self._nats) > 1 else {}
        return nats_file(self._spec, self._passwords, **several)

    def _service(self, name: str, count: Any, ports: Mapping[str, int] = NONE) -> list[Object]:
        container = self._container(name, {"metrics": METRICS_PORT, **ports}) | _probed("metrics")
        return _set(name, count, self._pod(name, [container]), {f"{name}.json": self._files[f"{name}.json"]})

    def _workers(self, name: str, slots: list[WorkerSlot]) -> list[Object]:
        files = {}
        for slot in slots:
            migrator = json.loads(self._files[f"{migrator_of(slot.name)}.json"])
            migrator["telemetry"]["metrics_port"] = MIGRATOR_METRICS_PORT
            files[f"{slot.name}.json"] = self._files[f"{slot.name}.json"]
            files[f"{slot.name}.migrator.json"] = json.dumps(migrator, indent=1)
            files[f"{slot.name}.broker.json"] = self._files[f"{broker_of(slot.name)}.json"]
        own, group, models = f"{SECRETS}/$(POD_NAME)", slots[0].group, [slots[0].model]
        mounts = {"cache": "/cache", "kv": "/kv", "shm": "/dev/shm"}
        words = ["services.worker", "--config", f"{own}.json"]
        worker = self._container(name, {"metrics": METRICS_PORT}, mounts, words) | _probed("metrics", LOADING_S)
        # A GPU's asks for memory, too: what asks for nothing is the first to go where a node is short of it.
        needed, gpus = _bounds(*CPU_WORKER), group.tensor_parallel
        if group.device != "cpu":
            asked = {"cpu": str(2 * gpus), "memory": f"{8 * gpus}Gi"}
            needed = {"requests": asked, "limits": {"nvidia.com/gpu": gpus}}
        worker |= {"image": self._images["worker"], "resources": self._value(f"{name}/resources", needed)}
        worker["volumeMounts"] += self._model_mounts(models)
        words = ["deployment.migrator", "--config", f"{own}.migrator.json", "--broker", f"{own}.broker.json"]
        migrator = self._container("migrator", {"migrator": MIGRATOR_METRICS_PORT}, words=words) | _probed("migrator")
        volumes: list[Object] = [{"name": "cache", "emptyDir": {}}, *self._model_volumes(models)]
        volumes += [{"name": n, "emptyDir": {"medium": "Memory", "sizeLimit": size}} for n, size in SHARED.items()]
        limits = [msgspec.json.decode(files[f"{slot.name}.json"], type=WorkerConfig).limits for slot in slots]
        drain_ms = max(each.drain_limit_ms + each.linger_ms for each in limits)
        pod = self._pod(name, [worker], volumes, drain_s=2 * drain_ms / 1000)  # its migrator ends after it
        pod["initContainers"] = [migrator | {"restartPolicy": "Always"}]
        return [*_set(name, len(slots), pod, files), _budget(name)]

    def _ingresses(self) -> list[Object]:
        ingress = self._container("ingress", {"http": 8000, "metrics": METRICS_PORT})
        # A new one gets requests once every model has an instance; later it waits for one, or answers why it has none.
        # One that is cut off from NATS gets none, and its streams wait: it is not started anew.
        ready = {"startupProbe": _probe("http", LOADING_S // 5, "/ready")}
        ingress |= _probed("metrics") | ready | {"readinessProbe": _probe("http", 3, "/health")}
        # It accepts nothing after SIGTERM, and a Service sends connections for a while longer.
        ingress["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "5"]}}}
        ingress["volumeMounts"] += self._model_mounts(self._spec.models)
        limits = msgspec.json.decode(self._files["ingress.json"], type=IngressConfig).limits
        pod = self._pod("ingress", [ingress], self._model_volumes(self._spec.models), drain_s=limits.drain_s)
        files = {name: text for name, text in self._files.items() if name in ("ingress.json", "keys.toml")}
        front = _front("ingress", {"http": 8000}, type=self._value("ingress/serviceType", "ClusterIP"))
        count = self._value("ingress/replicas", self._spec.services.ingresses)
        return [*_set("ingress", count, pod, files), front, _budget("ingress")]

    def _container(
        self, name: str, ports: Mapping[str, int] = NONE, mounts: Mapping[str, str] = NONE, words: Sequence[str] = ()
    ) -> Object:
        """A service in whose pods only the names differ, unless ``words`` say what to run."""
        words = list(words) or [f"services.{name}", "--config", f"{SECRETS}/{name}.json", "--name", "$(POD_NAME)"]
        paths = {"files": SECRETS, "tmp": "/tmp", **mounts}
        return {
            "name": name,
            "image": self._images["control"],
            "args": words,
            "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in paths.items()],
            "resources": self._value(f"{name}/resources", _bounds(*RESOURCES.get(name, CONTROL))),
            "securityContext": CONFINED,
        }

    def _pod(
        self, name: str, containers: list[Object], volumes: Sequence[Object] = (), *, drain_s: float = 0
    ) -> Object:
        files = {"name": "files", "secret": {"secretName": name, "defaultMode": 0o440}}
        return {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "shareProcessNamespace": True,  # Python as process 1 would not hear a SIGTERM while it loads a model
            "terminationGracePeriodSeconds": GRACE_S + int(drain_s),
            "topologySpreadConstraints": [SPREAD | {"labelSelector": _matching(name)}],
            "nodeSelector": self._value(f"{name}/nodeSelector", {}),
            "tolerations": self._value(f"{name}/tolerations", []),
            "imagePullSecrets": self._value("imagePullSecrets", []),
            "securityContext": USER | {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": containers,
            "volumes": [files, {"name": "tmp", "emptyDir": {}}, *volumes],
        }

    def _model_mounts(self, models: Sequence[ModelSpec]) -> list[Object]:
        mounts = []
        for model in models:
            volume = {"name": "models", "subPath": mount_source(model).name}
            volume = volume if self._claim else {"name": f"model-{self._spec.models.index(model)}"}
            mounts.append(volume | {"mountPath": str(mount_point(self._spec, model)), "readOnly": True})
        return mounts

    def _model_volumes(self, models: Sequence[ModelSpec]) -> list[Object]:
        if self._claim:
            return [{"name": "models", "persistentVolumeClaim": {"claimName": self._claim, "readOnly": True}}]
        paths = {f"model-{self._spec.models.index(model)}": str(mount_source(model)) for model in models}
        return [{"name": name, "hostPath": {"path": path, "type": "Directory"}} for name, path in paths.items()]


def _set(name: str, count: Any, pod: Object, files: dict[str, str], claims: Sequence[Object] = ()) -> list[Object]:
    """A Secret with the files of its pods, and the StatefulSet, whose pods roll when one of them changes."""
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
    watched = {} if name == "nats" else {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
    spec = {
        "replicas": count,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "selector": _matching(name),
        "template": {"metadata": _labels(name) | {"annotations": {"millrace/files": digest} | watched}, "spec": pod},
        "volumeClaimTemplates": list(claims),
    }
    return [_secret(name, files), _object("apps/v1", "StatefulSet", name, spec=spec)]


def _front(name: str, ports: dict[str, int], **more: Any) -> Object:
    told = [{"name": port, "port": number, "targetPort": port} for port, number in ports.items()]
    return _object("v1", "Service", name, spec={"selector": _labels(name)["labels"], "ports": told, **more})


def _secret(name: str, files: dict[str, str]) -> Object:
    return _object("v1", "Secret", name, stringData=files)


def _budget(name: str) -> Object:
    spec = {"maxUnavailable": 1, "selector": _matching(name), "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return _object("policy/v1", "PodDisruptionBudget", name, spec=spec)


def _object(version: str, kind: str, name: str = "millrace", **content: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name} | _labels(name), **content}


def _labels(name: str) -> Object:
    return {"labels": PART | {"app.kubernetes.io/name": name}}


def _matching(name: str) -> Object:
    return {"matchLabels": _labels(name)["labels"]}


def _bounds(cores: str, memory: str, cores_max: str, memory_max: str) -> Object:
    return {"requests": {"cpu": cores, "memory": memory}, "limits": {"cpu": cores_max, "memory": memory_max}}


def _probe(port: str, failures: int, path: str) -> Object:
    asked = {"port": port, "path": path}
    return {"httpGet": asked, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": failures}


def _probed(port: str, loading_s: int = 60) -> Object:
    failures = {"startupProbe": loading_s // 5, "readinessProbe": 3, "livenessProbe": 6}
    return {name: _probe(port, count, "/metrics") for name, count in failures.items()}


if __name__ == "__main__":
    sys.exit(main())
