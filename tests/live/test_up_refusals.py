"""`millrace up` with what cannot work: it says what is wrong and leaves nothing behind; and the ports it takes."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from millrace.cluster.spec import ApiSpec, ClusterSpec, NatsSpec, PageSpec, TelemetrySpec
from millrace.supervision.survivors import FILE

from services.supervisor.preflight import METRICS_PORTS, free_ports
from tests.live.ingress_rig import write_model_folder
from tests.testbed.certificates import make_certificate
from tests.testbed.up_cluster import free_port


def command_of(folder: Path, *words: str) -> list[str]:
    model = write_model_folder(folder / "model")
    return [
        *(sys.executable, "-m", "millrace.cli", "up", "--engine", "modelled", "--model", str(model)),
        *("--dir", str(folder / "cluster"), "--port", str(free_port()), "--nats-port", str(free_port()), *words),
    ]


def up(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command_of(folder, *words), capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--set", 'worker={"nope": 1}'], "millrace up: worker-0: Object contains unknown field `nope`"),
        (["--set", 'ingress={"limits": 3}'], "millrace up: ingress-0: Expected `object`, got `int` - at `$.limits`"),
        (["--instances", "0"], "millrace up: --instances 0: at least one per model, 1"),
        (["--dir", "/proc/x"], "millrace up: --dir /proc/x: No such file or directory"),
        (
            ["--host", "192.0.2.1", "--port", "8000"],
            "millrace up: nothing can listen on 192.0.2.1, port 8000: Cannot assign requested address",
        ),
        (["--set", "api.ssl_keyfile=/k"], "millrace up: api.ssl_certfile and api.ssl_keyfile go together"),
        (
            ["--set", "api.ssl_certfile=/c", "--set", "api.ssl_keyfile=/k"],
            "millrace up: api.ssl_certfile /c, api.ssl_keyfile /k: [Errno 2] No such file or directory: '/c'",
        ),
    ],
)
def test_what_a_service_would_refuse_is_refused_before_anything_starts(
    tmp_path: Path, words: list[str], refusal: str
) -> None:
    done = up(tmp_path, *words)
    assert (done.returncode, done.stderr.strip()) == (1, refusal)
    assert not list((tmp_path / "cluster").glob("logs/*"))


#: Settings by which no worker gets ready.
CANARY = {"canary": {"prompt": "Say", "text": "something that no engine says"}}
UNREADY = ("--instances", "1", "--set", "worker=" + json.dumps(CANARY))


@pytest.mark.parametrize("words", [(), ("--detach",)])
def test_a_start_that_is_interrupted_ends_with_130(tmp_path: Path, words: tuple[str, ...]) -> None:
    process = subprocess.Popen(command_of(tmp_path, *UNREADY, *words), stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "cluster" / FILE).exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert ("it goes on starting in the background" in said) == bool(words)
    millrace("down", "--dir", str(tmp_path / "cluster"), cwd=tmp_path)


def test_why_a_child_does_not_start_is_said_in_a_line_and_the_rest_is_stopped(tmp_path: Path) -> None:
    done = up(tmp_path, *UNREADY)
    assert done.returncode == 1
    why = done.stdout.partition("worker-0 did not start:\n")[2].splitlines()
    assert why[0].startswith("  worker-0: ")
    assert "canary: the engine says" in why[0]
    assert "the cluster is down" in why[1]
    assert "the cluster is down" in done.stdout


def test_https_and_hints_of_a_cluster_in_another_folder(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "here" / "cluster", tmp_path / "elsewhere"
    elsewhere.mkdir()
    certfile, keyfile = make_certificate(tmp_path / "tls")
    words = ["--set", f"api.ssl_certfile={certfile}", "--set", f"api.ssl_keyfile={keyfile}"]
    started = up(folder.parent, "--instances", "1", "--detach", *words)
    stop = f"millrace down --dir {folder}"
    try:
        assert started.returncode == 0, started.stderr
        assert stop.removeprefix("millrace ") in started.stdout
        address = re.findall(r"https://[0-9.:]+", started.stdout)[0]
        models = httpx.get(f"{address}/v1/models", verify=ssl.create_default_context(cafile=certfile))
        assert models.json()["data"][0]["id"] == "model"
        failed = millrace("down", cwd=elsewhere)
        assert failed.returncode == 1
        assert stop in failed.stderr
        shown = millrace("cluster", "show", "--dir", str(folder), cwd=elsewhere)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "[[models.groups]]" in shown.stdout
        assert "# at the start" not in shown.stdout
    finally:
        ended = millrace(*stop.split()[1:], cwd=elsewhere)
    assert (ended.returncode, ended.stdout) == (0, "the cluster is down\n")


def millrace(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "millrace.cli", *words]
    environment = {name: value for name, value in os.environ.items() if name != "MILLRACE_DIR"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=environment)


def test_a_probe_that_fails_says_why() -> None:
    url = f"http://127.0.0.1:{free_port()}/ready"
    command = [sys.executable, "-m", "millrace.cli", "probe", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"millrace probe: {url} does not answer: ")


def test_starts_at_the_same_time_choose_different_ports() -> None:
    page, nats = PageSpec(port=free_port()), NatsSpec(port=free_port())
    spec = ClusterSpec(models=[], telemetry=TelemetrySpec(metrics_port=free_port()), page=page, nats=nats)
    with free_ports(spec) as first, free_ports(spec) as second:
        assert (first.page, first.nats) == (page, nats)
        assert second.page.port not in (page.port, 0)
        assert second.nats.port != nats.port
        ports = first.telemetry.metrics_port, second.telemetry.metrics_port
        assert abs(ports[0] - ports[1]) >= METRICS_PORTS
    with free_ports(spec) as again:
        assert again.telemetry.metrics_port == ports[0]
    spec = ClusterSpec(models=[], api=ApiSpec(port=ports[0]), page=PageSpec(port=ports[0]))
    with free_ports(spec) as found:
        assert found.page.port != found.api.port
