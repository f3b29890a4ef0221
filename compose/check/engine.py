"""The docker engine, the one that runs or one of our own; and stand-ins for images where no registry is in reach."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from compose.check.calls import BUILD_SECONDS_MAX, COMPOSE, Failed, call, say, succeeds, wait

#: What the Dockerfile asks for; being able to pull it tells whether there is a registry.
USUAL_BASE = "python:3.11-slim-bookworm"
MADE_BASE = "millrace-base:bookworm"
MADE_PROMETHEUS = "millrace-prometheus:check"
MADE_COLLECTOR = "millrace-collector:check"


@contextlib.contextmanager
def docker_engine(work: Path) -> Iterator[None]:
    """A docker engine for as long as this takes.

    Where none runs, one is started (root is needed for that) and ended. Its images stay in MILLRACE_DOCKER_STATE, by
    default in the user's cache, so that the next run builds nothing twice.

    Raises:
        Failed: none runs and none can be started.
    """
    if shutil.which("docker") is None:
        raise Failed("docker is missing: apt-get install docker.io")
    if succeeds(["docker", "info"]):
        yield
        return
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        raise Failed("no docker engine runs, and none can be started: that takes root and apt-get install docker.io")
    say("no docker engine runs: one of our own, until the end")
    socket = f"unix://{work}/docker.sock"
    with (work / "dockerd.log").open("wb") as log:
        engine = _start(work, socket, log.fileno())
    os.environ["DOCKER_HOST"] = socket
    try:
        wait("dockerd", 60, lambda: engine.poll() is not None or succeeds(["docker", "info"]))
        if engine.poll() is not None:
            raise Failed(f"dockerd ended: {(work / 'dockerd.log').read_text()[-1500:]}")
        yield
    finally:
        del os.environ["DOCKER_HOST"]
        engine.terminate()
        engine.wait(timeout=60)


def _start(work: Path, socket: str, log: int) -> subprocess.Popen[bytes]:
    # With a hook of this name on its PATH dockerd accepts GPU reservations. Containers with one are created and looked
    # at here, never started.
    tools = work / "tools"
    tools.mkdir()
    hook = tools / "nvidia-container-runtime-hook"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    state = Path(os.environ.get("MILLRACE_DOCKER_STATE") or cache / "millrace" / "docker")
    state.mkdir(parents=True, exist_ok=True)
    folders = ["--data-root", str(state), "--exec-root", str(work / "exec"), "-p", str(work / "pid")]
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    return subprocess.Popen(["dockerd", *folders, "-H", socket], stdout=log, stderr=log, env=environment)


def registry_in_reach() -> bool:
    """Whether images of others can be had."""
    return succeeds(["docker", "pull", "-q", USUAL_BASE], limit_s=300)


def base_image() -> str:
    """A base image made from Debian's packages; three minutes the first time."""
    return call([COMPOSE / "base_image.sh", MADE_BASE], limit_s=BUILD_SECONDS_MAX).strip().splitlines()[-1]


def prometheus_image(base: str, work: Path) -> str:
    """Debian's Prometheus on that base, with the user and the folder that the usual image has."""
    folder = work / "prometheus"
    folder.mkdir()
    lines = [
        f"FROM {base}",
        "RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus wget >/dev/null \\",
        "    && install -d -o 65534 -g 65534 /prometheus",
        "USER 65534:65534",
        'ENTRYPOINT ["prometheus"]',
    ]
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    call(["docker", "build", "-q", "-t", MADE_PROMETHEUS, folder], limit_s=BUILD_SECONDS_MAX)
    return MADE_PROMETHEUS


def collector_image(control: str, work: Path) -> str:
    """A receiver of spans (collector.py) on the control image."""
    folder = work / "collector"
    folder.mkdir()
    shutil.copyfile(Path(__file__).parent / "collector.py", folder / "collector.py")
    (folder / "collector.py").chmod(0o644)
    lines = [
        f"FROM {control}",
        "COPY collector.py /opt/millrace/",
        'ENTRYPOINT ["python", "/opt/millrace/collector.py"]',
    ]
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    call(["docker", "build", "-q", "-t", MADE_COLLECTOR, folder], limit_s=BUILD_SECONDS_MAX)
    return MADE_COLLECTOR
