"""A provisioner beside docker compose: spare services of a compose project are started and stopped on order.

    python -m services.supervisor.compose_host --config compose/generated/provisioner.json

The same actor as the local supervisor's, over containers in place of processes: a spare service that was ordered is
kept running, one that was stopped drains and stays down. It runs on the host, where docker is. Started anew it takes
over the spare services that run; stopped, it drains and stops them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec
from millrace.actor.config import BusConfig, TelemetryConfig
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect
from millrace.actor.errors import ConfigError
from millrace.actor.runtime_nats import ActorHandle
from millrace.actor.task_shell import TaskShell
from millrace.contracts.catalog import Role
from millrace.hosting.service import host

from services.supervisor.actor import ACCEPTS, SupervisorActor
from services.supervisor.build import build
from services.supervisor.config import ChildSpec, SupervisorConfig
from services.supervisor.effects import ChildExited, ChildStarted, SignalChild, StartChild

#: How long docker may take to list containers at the start, seconds.
LIST_LIMIT_S = 30.0


class ComposeHostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a compose provisioner.

    Attributes:
        name: Unique name on the bus.
        host: Under this name provisioning reaches it.
        model: What its workers serve.
        compose: The command that every call begins with: docker compose, its files and profiles.
        services: Spare services; each has one instance of its own name.
        shapes: What a service's instance runs on, such as ``h100x2``; those that are missing are started for any shape.
        stop_limit_ms: How long after its drain a container may take to stop before it is killed.
    """

    name: str = "provisioner-0"
    host: str = "local"
    model: str
    compose: list[str]
    services: list[str]
    shapes: dict[str, str] = {}
    stop_limit_ms: int = 15_000
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    record: str = ""


def start_command(compose: Sequence[str], service: str) -> list[str]:
    """Starts one service, and nothing that it depends on: that runs already."""
    return [*compose, "up", "--detach", "--no-deps", service]


def wait_command(compose: Sequence[str], service: str) -> list[str]:
    """Ends when the service's container ends, with its status."""
    return [*compose, "wait", service]


def signal_command(compose: Sequence[str], service: str, number: int) -> list[str]:
    """Sends a signal to the service's main process."""
    return [*compose, "kill", "--signal", signal.Signals(number).name, service]


def list_command(compose: Sequence[str]) -> list[str]:
    """Lists the services that run, one a line."""
    return [*compose, "ps", "--services", "--status", "running"]


class ComposeShell(TaskShell):
    """Carries out a supervisor's effects on containers, which go on where it ends.

    Attributes:
        running: Spare services that ran when it was made, with the numbers that stand for their processes.
    """

    def __init__(self, config: ComposeHostConfig) -> None:
        """Asks docker what runs.

        Raises:
            ConfigError: docker cannot be called, or does not know the project.
        """
        super().__init__()
        self._compose = config.compose
        self._numbers = count(1)
        listed = _listed(config.compose)
        self.running = {name: next(self._numbers) for name in config.services if name in listed}

    def handlers(self) -> Mapping[type[Effect], Any]:
        return {StartChild: self.start, SignalChild: self.signal}

    def attach(self, handle: ActorHandle) -> None:
        """The actor runs: from now on it hears what becomes of containers."""
        super().attach(handle)
        for service, pid in self.running.items():
            self.spawn(self._wait(service, pid))

    def start(self, effect: StartChild) -> None:
        self.spawn(self._start(effect.spec.name))

    def signal(self, effect: SignalChild) -> None:
        """Carries out SignalChild. One that has ended is no error."""
        self.spawn(self._signal(effect.name, effect.signal))

    async def _start(self, service: str) -> None:
        status, detail = await _run(start_command(self._compose, service))
        if status != 0:
            self.tell(ChildExited(name=service, pid=0, status=status, detail=detail))
            return
        pid = next(self._numbers)
        self.tell(ChildStarted(name=service, pid=pid))
        await self._wait(service, pid)

    async def _wait(self, service: str, pid: int) -> None:
        status, detail = await _run(wait_command(self._compose, service))
        self.tell(ChildExited(name=service, pid=pid, status=status, detail="" if status == 0 else detail))

    async def _signal(self, service: str, number: int) -> None:
        await _run(signal_command(self._compose, service, number))


def build_host(config: ComposeHostConfig, deps: ActorDeps, running: Mapping[str, int]) -> SupervisorActor:
    """The actor over the spare services, those that run taken over."""
    specs = [
        ChildSpec(
            name=service,
            role=Role.WORKER,
            presences=[service],
            stop_limit_ms=config.stop_limit_ms,
            model=config.model,
            shape=config.shapes.get(service, ""),
        )
        for service in config.services
    ]
    machine = SupervisorConfig(
        name=config.name,
        bus=config.bus,
        host=config.host,
        children=[spec for spec in specs if spec.name in running],
        spares=[spec for spec in specs if spec.name not in running],
    )
    actor = build(machine, deps)
    for name, pid in running.items():
        actor.adopt(name, pid, deps.incarnation)
    return actor


def _listed(compose: Sequence[str]) -> set[str]:
    try:
        done = subprocess.run(list_command(compose), capture_output=True, text=True, timeout=LIST_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"compose: {error}") from None
    if done.returncode != 0:
        raise ConfigError(f"compose: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return set(done.stdout.split())


async def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit status and the end of what it said."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return os.EX_UNAVAILABLE, str(error)
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode(errors="replace")[-300:].strip()


def main() -> int:
    """Runs it until SIGTERM; returns the exit code."""
    shells: list[ComposeShell] = []

    def shell_of(config: ComposeHostConfig) -> ComposeShell:
        shells.append(ComposeShell(config))
        return shells[0]

    def actor(config: ComposeHostConfig, deps: ActorDeps) -> SupervisorActor:
        return build_host(config, deps, shells[0].running)

    return host(Role.SUPERVISOR, ComposeHostConfig, ACCEPTS, actor, shell_of=shell_of)


if __name__ == "__main__":
    sys.exit(main())
