"""Builds the deployment, brings it up, breaks it under load and looks at everything; takes it down again.

    ./task test:compose [--model DIR] [--base IMAGE]

Needs promtool, and a running docker engine or root and dockerd; then one of our own is started and ended. Where no
image registry is in reach the base image and Prometheus are made from Debian's packages, a receiver of spans stands in
for the OpenTelemetry collector (collector.py), and Grafana and Jaeger are left out, which the run says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from compose.check import nats_servers
from compose.check.calls import ROOT, Failed, call, say, wait
from compose.check.deployment import Container, Deployment, is_healthy
from compose.check.engine import (
    MADE_COLLECTOR,
    USUAL_BASE,
    base_image,
    collector_image,
    docker_engine,
    prometheus_image,
    registry_in_reach,
)
from compose.check.metrics import Prometheus, counter_of, panels, promtool, refuse_junk
from compose.check.moves import CONTINUATIONS, Moves
from compose.check.operator import Operator
from compose.check.streams import Api, Streams, ready, try_refusals

WORKERS = ("worker-0", "worker-1", "migrator-0", "migrator-1")
SERVICES = ("nats", "tagger", "predictor", "coordinator", "ingress", *WORKERS, "prometheus")
COLLECTOR = "otel-collector"
OTHERS = ("jaeger", "grafana")
SCRAPED = 8
#: Importing vLLM takes five seconds on an idle machine and minutes where twenty processes share two cores.
START_SECONDS_MAX = 420


def main() -> int:
    """Runs every step; the last line says what happened."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-compose-")))
            say(f"alert rules: {promtool()}; their tests pass")
            stack.enter_context(docker_engine(work))
            _run(arguments, work)
    except Failed as error:
        print(f"test:compose: FAILED after {time.monotonic() - began:.0f} s: {error}", file=sys.stderr)
        return 1
    print(f"test:compose: passed in {time.monotonic() - began:.0f} s; everything is taken down")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./task test:compose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="", help="base image; by default the usual one, or one that is made")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "millrace-mini", help="folder of the model")
    return parser.parse_args()


def _run(arguments: argparse.Namespace, work: Path) -> None:
    reached = not arguments.base and registry_in_reach()
    base = arguments.base or (USUAL_BASE if reached else base_image())
    published = ("PORT", "NATS_PORT", "NATS_1_PORT", "NATS_2_PORT", "PROMETHEUS_PORT")
    ports = {f"MILLRACE_{name}": str(_free_port()) for name in published}
    images = {"MILLRACE_CONTROL_IMAGE": "millrace-control:check", "MILLRACE_WORKER_IMAGE": "millrace-worker:check"}
    environment = os.environ | ports | images | {"BASE_IMAGE": base, "COMPOSE_PROJECT_NAME": "millrace-check"}
    if not reached:
        environment |= {"PROMETHEUS_IMAGE": prometheus_image(base, work), "OTEL_COLLECTOR_IMAGE": MADE_COLLECTOR}
        say(f"no image registry: LEFT OUT are {', '.join(OTHERS)}; Prometheus is Debian's, the collector a stand-in")
    model = _readable_copy(arguments.model, work)
    keys = work / "keys.toml"
    api = Api(f"http://127.0.0.1:{ports['MILLRACE_PORT']}", _key(keys, "check"), _key(keys, "limited", 1))
    options = ["--cpus", "2", "--model", str(model), "--keys", str(keys)]
    deployment = Deployment(work / "cpu", environment, options)
    say(f"images on {base} (the first build installs vLLM)")
    began = time.monotonic()
    for service in ("ingress", "worker-0"):  # one after the other: what both begin with is built once
        deployment.compose("build", "--quiet", service, build=True)
    if not reached:
        collector_image(images["MILLRACE_CONTROL_IMAGE"], work)
    say(f"images built in {time.monotonic() - began:.0f} s")
    for tensor_parallel in (1, 2):
        _gpu_reservations(work, environment, model, tensor_parallel)
    with deployment.torn_down_after(), _logs_of(deployment):
        _break_and_look(deployment, api, ports, work=work, stands_in=not reached)
    three = Deployment(work / "three", environment, [*options, *nats_servers.OPTIONS])
    with three.torn_down_after(), _logs_of(three):
        nats_servers.try_three(three, api, int(ports["MILLRACE_NATS_PORT"]))


@contextlib.contextmanager
def _logs_of(deployment: Deployment) -> Iterator[None]:
    """Prints what the containers said last where something goes wrong."""
    try:
        yield
    except BaseException:
        print(deployment.logs()[-60_000:], file=sys.stderr)
        raise


def _gpu_reservations(work: Path, environment: dict[str, str], model: Path, tensor_parallel: int) -> None:
    """Two workers of so many GPUs each, created and not started: docker knows which devices each asks for."""
    options = ["--gpus", str(2 * tensor_parallel), "--tensor-parallel", str(tensor_parallel), "--model", str(model)]
    deployment = Deployment(work / f"gpu-{tensor_parallel}", environment, options)
    with deployment.torn_down_after():
        deployment.compose("create", "--no-build", "worker-0", "worker-1")
        devices = [str(device) for device in range(2 * tensor_parallel)]
        for service, own in (("worker-0", devices[:tensor_parallel]), ("worker-1", devices[tensor_parallel:])):
            container = deployment.inspect(service)
            requests = container["HostConfig"]["DeviceRequests"] or []
            found = [(request["Driver"], request["DeviceIDs"], request["Capabilities"]) for request in requests]
            if found != [("nvidia", devices, [["gpu"]])]:
                raise Failed(f"{service} reserves {found}, not GPUs {devices}")
            order = ",".join([*own, *(device for device in devices if device not in own)])
            if f"CUDA_VISIBLE_DEVICES={order}" not in container["Config"]["Env"]:
                raise Failed(f"{service} does not take its own GPUs {own} first")
            if not container["HostConfig"]["PidMode"].startswith("container:"):
                raise Failed(f"{service} shares no pid namespace: CUDA cannot copy between workers")
    say(f"GPU reservations of 2 workers with TP {tensor_parallel}: as docker inspect shows them")


def _break_and_look(deployment: Deployment, api: Api, ports: dict[str, str], *, work: Path, stands_in: bool) -> None:
    prometheus = Prometheus(f"http://127.0.0.1:{ports['MILLRACE_PROMETHEUS_PORT']}")
    nats_port = int(ports["MILLRACE_NATS_PORT"])
    began = time.monotonic()
    deployment.compose("up", "-d", "--no-build", *SERVICES, COLLECTOR, *(() if stands_in else OTHERS))
    wait("the API", START_SECONDS_MAX, lambda: ready(api))
    say(f"up: the API is ready after {time.monotonic() - began:.0f} s")
    _all_healthy(deployment)
    _confined(deployment, (*SERVICES, "buckets"))
    undisturbed = _undisturbed(api)
    operator = Operator(deployment, nats_port)
    moves = Moves(deployment, api, operator=operator, prometheus=prometheus, work=work)
    moves.there_and_back(traces=stands_in)
    moves.drained_and_stopped()
    # A worker imports vLLM when it comes back, the slowest step here: meanwhile the others are killed.
    _control_death(deployment, api, undisturbed)
    _nats_death(deployment, api, nats_port, undisturbed)
    moves.back(START_SECONDS_MAX)
    before = counter_of(f"{api.url}/metrics", CONTINUATIONS)
    for name in ("worker-0", "worker-1"):
        _wait_back(_worker_death(deployment, api, name, undisturbed))
    if counter_of(f"{api.url}/metrics", CONTINUATIONS) == before:  # prefixes draw all streams to one of them
        raise Failed("no stream was continued: neither worker decoded any when it was killed")
    _panels(deployment, api, nats_port, prometheus)
    _ingress_death(deployment, api)
    _all_healthy(deployment)
    say("every container of ours is healthy")


def _undisturbed(api: Api) -> list[str]:
    streams = Streams(api)
    texts = streams.texts()
    characters = sum(map(len, texts))
    say(f"{len(texts)} streamed requests at once: {characters} characters, longest pause {streams.gap_s:.2f} s")
    return texts


def _worker_death(deployment: Deployment, api: Api, name: str, undisturbed: list[str]) -> Container:
    """Kills a worker in the middle of all streams."""
    before = counter_of(f"{api.url}/metrics", CONTINUATIONS)
    container = Container(deployment, name)
    streams = _under_death(api, [container], undisturbed)
    continued = counter_of(f"{api.url}/metrics", CONTINUATIONS) - before
    say(f"{name} killed: {continued:.0f} streams continued, texts identical, longest pause {streams.gap_s:.2f} s")
    return container


def _control_death(deployment: Deployment, api: Api, undisturbed: list[str]) -> None:
    containers = [Container(deployment, name) for name in ("tagger", "coordinator")]
    streams = _under_death(api, containers, undisturbed)
    for container in containers:
        _wait_back(container)
    say(f"tagger and coordinator killed: texts identical, longest pause {streams.gap_s:.2f} s")


def _nats_death(deployment: Deployment, api: Api, port: int, undisturbed: list[str]) -> None:
    container = Container(deployment, "nats")
    away_s: list[float] = []
    streams = _under_death(
        api, [container], undisturbed, then=lambda: away_s.append(wait("nats to be back", 10, lambda: _greets(port)))
    )
    _wait_back(container)
    say(f"nats killed: back after {away_s[0]:.1f} s, texts identical, longest pause {streams.gap_s:.2f} s")


def _under_death(
    api: Api, containers: list[Container], undisturbed: list[str], then: Callable[[], None] = lambda: None
) -> Streams:
    """Kills containers in the middle of all streams: none may fail, and every text must be the undisturbed one."""
    streams = Streams(api)
    streams.wait_until_all_speak()
    for container in containers:
        container.crash()
    then()
    for text, wanted in zip(streams.texts(), undisturbed, strict=True):
        if text != wanted:
            killed = " and ".join(container.service for container in containers)
            raise Failed(f"a text changed when {killed} died:\n{wanted!r}\n{text!r}")
    return streams


def _wait_back(container: Container) -> None:
    """Until docker's restart policy has brought the same container back and it is healthy."""
    wait(f"{container.service} to be back", START_SECONDS_MAX, container.is_back)


def _ingress_death(deployment: Deployment, api: Api) -> None:
    container = Container(deployment, "ingress")
    container.crash()
    wait("ingress to have gone", 10, lambda: not ready(api))
    away_s = wait("ingress to be ready again", 60, lambda: ready(api))
    _wait_back(container)
    Streams(api).texts()
    say(f"ingress killed: ready again after {away_s:.1f} s, and it streams")


def _greets(port: int) -> bool:
    """Whether nats-server says INFO to a new connection."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


def _panels(deployment: Deployment, api: Api, nats_port: int, prometheus: Prometheus) -> None:
    # Two panels count refusals, so there must be some: requests, and bytes that are no message.
    try_refusals(api)
    passwords = json.loads((deployment.folder / "passwords.json").read_text())
    refuse_junk(f"nats://127.0.0.1:{nats_port}", passwords["ingress"], "mr.node.tag.millrace-mini")
    wait("every target to be scraped", 60, lambda: prometheus.query('sum(up{job="millrace"})') == [float(SCRAPED)])
    wait("alert rules to be evaluated", 60, lambda: not prometheus.rules_in_error())
    say(f"Prometheus scrapes {SCRAPED} targets, its alert rules evaluate, {panels(prometheus)} panel queries have data")


def _confined(deployment: Deployment, services: tuple[str, ...]) -> None:
    """Non-root, read-only, without capabilities, and no password in anything that docker tells about them."""
    passwords = json.loads((deployment.folder / "passwords.json").read_text()).values()
    for service in services:
        found = deployment.inspect(service)
        host = found["HostConfig"]
        if found["Config"]["User"].split(":")[0] in ("", "0", "root"):
            raise Failed(f"{service} runs as root")
        if not host["ReadonlyRootfs"] or host["CapDrop"] != ["ALL"] or host["Privileged"]:
            raise Failed(f"{service} is not confined: {host['ReadonlyRootfs']=} {host['CapDrop']=}")
        if any(password in json.dumps(found) for password in passwords):
            raise Failed(f"docker inspect shows a password of {service}")
    say(f"{len(services)} containers: not root, read-only, no capabilities, no password in docker inspect")


def _all_healthy(deployment: Deployment) -> None:
    def unhealthy() -> list[str]:
        return [service for service in SERVICES if not is_healthy(deployment.inspect(service))]

    try:
        wait("health", START_SECONDS_MAX, lambda: not unhealthy())
    except Failed:
        raise Failed(f"not healthy in time: {', '.join(unhealthy())}") from None
    if code := deployment.inspect("buckets")["State"]["ExitCode"]:
        raise Failed(f"buckets ended with {code}")


def _key(file: Path, name: str, requests_per_minute: int = 0) -> str:
    """A new API key, as `millrace keys add` prints it."""
    limit = ["--requests-per-minute", str(requests_per_minute)]
    return call([sys.executable, "-m", "millrace.cli", "keys", "--file", file, "add", name, *limit]).split()[0]


def _readable_copy(model: Path, work: Path) -> Path:
    """The model where the containers' user may read it, whatever the modes of the tree are."""
    target = work / "millrace-mini"
    target.mkdir()
    for file in model.iterdir():
        if file.is_file():
            shutil.copyfile(file, target / file.name)
            (target / file.name).chmod(0o644)
    target.chmod(0o755)
    return target


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
