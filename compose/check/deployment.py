"""A prepared deployment and what docker says about its containers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from compose.check.calls import BUILD_SECONDS_MAX, CALL_SECONDS_MAX, COMPOSE, Failed, call, succeeds


@cache
def compose_command() -> tuple[str, ...]:
    """Docker's own compose, or the one that the dev requirements bring."""
    if succeeds(["docker", "compose", "version"]):
        return ("docker", "compose")
    return (str(Path(sys.executable).parent / "docker-compose"),)


class Deployment:
    """One prepared folder and the compose project made from it.

    Args:
        folder: Where compose/prepare.py writes.
        environment: For compose; COMPOSE_PROJECT_NAME in it keeps clear of a deployment that somebody uses.
        options: Of compose/prepare.py.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], options: list[str]) -> None:
        self.folder = folder
        self._environment = environment
        self._profile = "gpu" if "--gpus" in options else "cpu"
        call([sys.executable, COMPOSE / "prepare.py", *options, "--out", folder])
        self.compose("config", "--quiet")

    def compose(self, *words: str, check: bool = True, build: bool = False) -> str:
        """Runs docker compose; returns its output."""
        options = ["--env-file", self.folder / ".env", "--profile", self._profile]
        limit_s = BUILD_SECONDS_MAX if build else CALL_SECONDS_MAX
        return call([*compose_command(), *options, *words], env=self._environment, check=check, limit_s=limit_s)

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what docker knows about a service's container, running or not.

        Raises:
            Failed: it has none.
        """
        container = self.compose("ps", "-a", "-q", service).strip()
        if not container:
            raise Failed(f"{service} has no container")
        found: list[dict[str, Any]] = json.loads(call(["docker", "inspect", container]))
        return found[0]

    def logs(self) -> str:
        """The last lines of every container."""
        return self.compose("logs", "--no-color", "--tail", "25", check=False)

    @contextlib.contextmanager
    def torn_down_after(self) -> Iterator[None]:
        """Removes containers, networks and volumes at the end, and before it what a killed run may have left."""
        self.compose("down", "-v", "--remove-orphans", "--timeout", "5", check=False)
        try:
            yield
        finally:
            self.compose("down", "-v", "--remove-orphans", "--timeout", "15")


class Container:
    """One running container and its life as docker counts it."""

    def __init__(self, deployment: Deployment, service: str) -> None:
        self.service = service
        self._deployment = deployment
        self.before = self._state()

    def crash(self) -> None:
        """Kills its main process from outside. `docker kill` would not do: docker then takes the container for stopped
        by hand and leaves it down.

        Raises:
            Failed: the process is not ours to kill (the engine runs on another machine, or we are not root).
        """
        pid = self.before["State"]["Pid"]
        try:
            os.kill(pid, signal.SIGKILL)
        except (PermissionError, ProcessLookupError) as error:
            raise Failed(f"{self.service}, process {pid}: {error}; root on the engine's machine is needed") from None

    def is_back(self) -> bool:
        """Whether the restart policy has started the same container again and it is healthy."""
        now = self._state()
        same = now["Id"] == self.before["Id"] and now["RestartCount"] > self.before["RestartCount"]
        return bool(same and is_healthy(now))

    def _state(self) -> dict[str, Any]:
        return self._deployment.inspect(self.service)


def is_healthy(inspected: Mapping[str, Any]) -> bool:
    """Whether a container runs and its health check says so."""
    state = inspected["State"]
    return bool(state["Running"]) and state.get("Health", {}).get("Status") == "healthy"
