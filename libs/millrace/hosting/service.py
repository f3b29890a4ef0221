"""Hosts one actor as a process: the shell that services without an engine or an HTTP side share."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import msgspec

from millrace.actor.actor import Actor
from millrace.actor.cell import HostingTerms
from millrace.actor.clock import unix_ns
from millrace.actor.config import BusConfig, TelemetryConfig, load_config
from millrace.actor.deps import ActorDeps, actor_rng
from millrace.actor.effects import Effect
from millrace.actor.errors import BusError, ConfigError
from millrace.actor.loop import run_to_end
from millrace.actor.runtime_nats import ActorHandle, NatsRuntime
from millrace.contracts.channels import Role
from millrace.contracts.message import Body
from millrace.telemetry import Telemetry, open_telemetry


class ServiceConfig(Protocol):
    """Fields that every service's configuration has."""

    @property
    def name(self) -> str: ...
    @property
    def bus(self) -> BusConfig: ...
    @property
    def telemetry(self) -> TelemetryConfig: ...


class Shell(Protocol):
    """Carries out a service's own effects; results go back through the handle."""

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        """Return the handler of each effect type. Called once, before ``attach``."""
        ...

    def attach(self, handle: ActorHandle) -> None:
        """The actor is hosted; it starts right after."""
        ...

    def close(self) -> None:
        """The actor has stopped, or never ran."""
        ...


class Joining(Protocol):
    """Interface of a companion: it can be hosted beside a process's own actor."""

    def join(self, runtime: NatsRuntime, telemetry: Telemetry) -> None:
        """Adds the actor to a runtime that is connected."""
        ...

    def leave(self) -> None:
        """The runtime has ended."""
        ...


C = TypeVar("C", bound=ServiceConfig)
D = TypeVar("D", bound=ActorDeps)


def masked(config: object) -> dict[str, object]:
    """A configuration as plain types with its secrets hidden, for the line at start."""
    fields: dict[str, object] = msgspec.to_builtins(config)
    bus = fields.get("bus")
    if isinstance(bus, dict) and bus.get("password"):
        bus["password"] = "***"
    return fields


def host(
    role: str,
    kind: type[C],
    accepts: tuple[type[Body], ...],
    build: Callable[[C, D], Actor],
    *,
    deps_of: Callable[[C, ActorDeps, Telemetry], D] | None = None,
    shell_of: Callable[[C], Shell] | None = None,
    companions: Mapping[str, Callable[[str], Joining]] = MappingProxyType({}),
) -> int:
    """Reads ``--config`` and ``--name``, connects, runs the actor until it stops; returns the exit code.

    Args:
        role: Name of the service, for logs.
        kind: Its configuration's type.
        accepts: Wire types that the actor takes.
        build: Builds the actor from configuration and dependencies.
        deps_of: Adds the service's own dependencies to those that all services share; None where it has none.
        shell_of: Makes what carries out the service's own effects; None where it has none.
        companions: Actors that the process hosts beside its own where their option names a configuration file, by
            role; each is made from the file's path.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}")
    parser.add_argument("--config", required=True, help="TOML or JSON file")
    parser.add_argument("--name", default="", help="in place of the file's")
    for name in companions:
        parser.add_argument(f"--{name}", default="", help=f"configuration of a {name} that it hosts")
    try:
        arguments = vars(parser.parse_args())
        config = load_config(kind, arguments["config"], name=arguments["name"])
        hosted = [make_companion(arguments[name]) for name, make_companion in companions.items() if arguments[name]]
        shell = shell_of(config) if shell_of is not None else None

        def make(deps: ActorDeps, telemetry: Telemetry) -> Actor:
            return build(config, cast("D", deps) if deps_of is None else deps_of(config, deps, telemetry))

        return run_to_end(_serve(role, config, accepts, make, shell, hosted))
    except (ConfigError, BusError) as error:
        print(f"{role}: {error}", file=sys.stderr)  # noqa: T201  # before there is a logger
        return 1


async def _serve(
    role: str,
    config: C,
    accepts: tuple[type[Body], ...],
    make: Callable[[ActorDeps, Telemetry], Actor],
    shell: Shell | None,
    hosted: Sequence[Joining],
) -> int:
    telemetry = open_telemetry(role, config.name, config.telemetry)
    try:
        telemetry.logger.info("starting", config=masked(config))
        telemetry.serve_metrics()
        runtime = NatsRuntime(
            bus=config.bus,
            name=config.name,
            telemetry=telemetry,
            registry=telemetry.registry,
            local=bool(hosted),
        )
        await runtime.connect()
        for companion in hosted:
            companion.join(runtime, telemetry)
        incarnation = unix_ns()
        deps = ActorDeps(
            incarnation=incarnation,
            rng=actor_rng(config.name, incarnation),
            registry=telemetry.registry,
            clock=time.perf_counter_ns,
        )
        actor = make(deps, telemetry)
        handlers = shell.handlers() if shell is not None else {}
        terms = HostingTerms(role=Role(role) if hosted else None)
        handle = runtime.add(actor, accepts=accepts, handlers=handlers, terms=terms)
        if shell is not None:
            shell.attach(handle)
        reason = await runtime.run()
        telemetry.logger.info("stopped", reason=reason)
    finally:
        if shell is not None:
            shell.close()
        for companion in hosted:
            companion.leave()
        telemetry.close()
    return 0
