"""Runs the containers of Kubernetes manifests as processes, in a root, network and process namespace of their own.

    unshare --mount --net --pid --fork --kill-child python -m tests.testbed.pods MANIFESTS MODEL

A container's program, arguments, environment and files are those of the manifests, a process that ends is started
again, and hosts' names lead to loopback. Only metrics ports differ: all pods share one network. It asks a chat, ends a
worker's pod under load as Kubernetes ends one, and prints what came of it as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from tests.testbed.timed_streams import TimedStream, client, play, until_answered

#: What the images bring, or a volume of a pod.
FOLDERS = ("data", "kv", "cache", "model", "run/secrets")

LIMIT_S = 240.0

STREAMS, TOKENS = 4, 200


class Cluster:
    """The pods of the manifests.

    Attributes:
        url: Of the API, and ``model`` as it is called: what a stream asks.
    """

    url, model = "http://ingress:8000", "m"

    def __init__(self, manifests: Path) -> None:
        self._objects = list(yaml.safe_load_all(manifests.read_text()))
        self._running: dict[tuple[str, str], tuple[list[str], dict[str, str], subprocess.Popen[bytes]]] = {}
        self._ended: set[str] = set()
        ports = count(9200)
        for each in self._of("Secret"):
            for name, text in each["stringData"].items():
                fields = json.loads(text) if name.endswith(".json") else {}
                if "telemetry" in fields:
                    fields["telemetry"]["metrics_port"] = next(ports)
                Path("/run/secrets", name).write_text(json.dumps(fields) if fields else text)

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self._objects if each["kind"] == kind]

    def start(self) -> None:
        """Every container of every pod at once, jobs too."""
        for each in self._of("StatefulSet"):
            for ordinal in range(each["spec"]["replicas"]):
                self._pod(f"{each['metadata']['name']}-{ordinal}", each["spec"]["template"]["spec"])
        for each in self._of("Job"):
            self._pod(each["metadata"]["name"], each["spec"]["template"]["spec"])

    def _pod(self, pod: str, spec: dict[str, Any]) -> None:
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            words = [*container.get("command", ["python", "-m"]), *container["args"]]
            words = [word.replace("$(POD_NAME)", pod) for word in words]
            environment = os.environ | {each["name"]: pod for each in container["env"]}
            self._run(pod, container["name"], words, environment)

    def _run(self, pod: str, container: str, words: list[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(words, env=environment, stdout=sys.stderr)
        self._running[pod, container] = (words, environment, process)

    async def keep(self) -> None:
        """Starts again what ends, as Kubernetes does: services until they run, a job until it succeeds."""
        jobs = {each["metadata"]["name"] for each in self._of("Job")}
        while True:
            for (pod, container), (words, environment, process) in list(self._running.items()):
                if (
                    process.poll() is not None
                    and pod not in self._ended
                    and not (pod in jobs and not process.returncode)
                ):
                    self._run(pod, container, words, environment)
            await asyncio.sleep(1)

    async def end(self, pod: str) -> list[int]:
        """Ends a pod: its containers by SIGTERM, its sidecars after them. Returns how each ended."""
        self._ended.add(pod)
        statuses = []
        for container in (pod.rpartition("-")[0], "migrator"):
            process = self._running[pod, container][2]
            process.send_signal(signal.SIGTERM)
            statuses.append(await asyncio.to_thread(process.wait, 60))
        return statuses

    def probes(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Probes of the first container of a set."""
        (spec,) = (e["spec"]["template"]["spec"] for e in self._of("StatefulSet") if e["metadata"]["name"] == name)
        yield from ((probe, each) for probe, each in spec["containers"][0].items() if probe.endswith("Probe"))


def enter_root(model: Path) -> None:
    """Changes into a root that has the images' folders and this machine's other ones."""
    root = make_root(("run", *FOLDERS))
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
    mount("--bind", model, root / "model")
    (root / "hosts").write_text("127.0.0.1 localhost nats ingress page\n")
    mount("--bind", root / "hosts", root / "etc/hosts")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.chroot(root)
    os.chdir("/run")


def make_root(apart: Collection[str]) -> Path:
    """A root with this machine's folders but those that are to be apart."""
    root = Path(tempfile.mkdtemp())
    mount("-t", "tmpfs", "tmpfs", root)
    for entry in Path("/").iterdir():
        if entry.is_symlink():
            (root / entry.name).symlink_to(entry.readlink())
        elif entry.is_dir() and entry.name not in apart:
            (root / entry.name).mkdir()
            mount("--rbind", entry, root / entry.name)
    return root


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


async def run(cluster: Cluster) -> dict[str, Any]:
    """Starts, asks, ends a worker's pod under load."""
    cluster.start()
    keeping = asyncio.create_task(cluster.keep())
    async with client(120) as http:
        probes = dict(cluster.probes("ingress"))
        await until_answered(f"{cluster.url}{probes['startupProbe']['httpGet']['path']}", LIMIT_S)
        healthy = (await http.get(f"{cluster.url}{probes['readinessProbe']['httpGet']['path']}")).status_code
        asked = dict(cluster.probes("nats"))["readinessProbe"]["exec"]["command"]
        nats = (await asyncio.to_thread(subprocess.run, asked, check=False)).returncode
        body = {"model": cluster.model, "messages": [{"role": "user", "content": "a b"}], "max_tokens": 3}
        chat = (await http.post(f"{cluster.url}/v1/chat/completions", json=body)).json()
        streams = [TimedStream() for _ in range(STREAMS)]
        prompts = [f"tell story {number}" for number in range(STREAMS)]
        fields = {"max_tokens": TOKENS, "ignore_eos": True}
        playing = [play(http, cluster, s, prompt=p, **fields) for s, p in zip(streams, prompts, strict=True)]
        tasks = [asyncio.create_task(each) for each in playing]
        await asyncio.gather(*(each.settled.wait() for each in streams))
        ended = await cluster.end("worker-0")
        await asyncio.gather(*tasks)
        metrics = (await http.get(f"{cluster.url}/metrics")).text.splitlines()
    keeping.cancel()
    return {
        "healthy": healthy,
        "nats": nats,
        "chat_tokens": chat["usage"]["completion_tokens"],
        "ended": ended,
        "streams": [(each.tokens, each.finish, each.error) for each in streams],
        "moved": [line for line in metrics if line.startswith("millrace_ingress_migrations_total{")],
        "recomputed": [line for line in metrics if line.startswith("millrace_ingress_continuations_total{")],
    }


def main() -> None:
    """Prints the result; processes end with this one's namespace."""
    manifests = Path(sys.argv[1]).read_text()
    enter_root(Path(sys.argv[2]))
    Path("/run/manifests.yaml").write_text(manifests)
    print(json.dumps(asyncio.run(run(Cluster(Path("/run/manifests.yaml"))))))


if __name__ == "__main__":
    main()
