"""Hosts an actor in the process of another one, on its connection.

The companion keeps its own configuration, permissions and metrics. Its crash ends it alone: it is built anew after a
pause, and until then questions to it find no responder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from millrace.actor.actor import Actor
from millrace.actor.cell import HostingTerms
from millrace.actor.clock import unix_ns
from millrace.actor.deps import ActorDeps, actor_rng
from millrace.actor.effects import Effect
from millrace.contracts.channels import Role
from millrace.contracts.message import Body
from millrace.hosting.service import ServiceConfig, Shell, masked

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from millrace.actor.runtime_nats import NatsRuntime
    from millrace.telemetry import Telemetry

#: Pause before a crashed companion is built anew, seconds: the same message may come again.
REBUILD_S = 1.0

#: Builds the actor.
Make = Callable[[ActorDeps, "Telemetry"], Actor]


class Companion:
    """One hosted actor."""

    def __init__(
        self,
        role: Role,
        config: ServiceConfig,
        accepts: tuple[type[Body], ...],
        make: Make,
        *,
        shell: Shell | None = None,
    ) -> None:
        """Args:
        role: Of the actor, whose permissions hold for it.
        accepts: Wire types that it takes.
        make: Builds it; called again after a crash.
        shell: Carries out the service's own effects; None where it has none.
        """
        self._role = role
        self._config = config
        self._accepts = accepts
        self._make = make
        self._shell = shell
        self._registry = CollectorRegistry()

    def join(self, runtime: NatsRuntime, telemetry: Telemetry) -> None:
        """Adds the actor to a runtime that is connected."""
        telemetry.logger.info("hosting", actor=self._config.name, config=masked(self._config))
        telemetry.registry.register(self)
        self._build(runtime, telemetry)

    def leave(self) -> None:
        if self._shell is not None:
            self._shell.close()

    def describe(self) -> list[Metric]:
        """No names in advance: they are the actor's own."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()

    def _build(self, runtime: NatsRuntime, telemetry: Telemetry) -> None:
        config, incarnation = self._config, unix_ns()
        self._registry = CollectorRegistry()
        deps = ActorDeps(
            incarnation=incarnation,
            rng=actor_rng(config.name, incarnation),
            registry=self._registry,
            clock=time.perf_counter_ns,
        )
        handlers: Mapping[type[Effect], Callable[[Any], None]] = self._shell.handlers() if self._shell else {}
        handle = runtime.add(
            self._make(deps, telemetry),
            accepts=self._accepts,
            handlers=handlers,
            terms=HostingTerms(role=self._role, on_crash=lambda: self._rebuild_later(runtime, telemetry)),
        )
        if self._shell is not None:
            self._shell.attach(handle)

    def _rebuild_later(self, runtime: NatsRuntime, telemetry: Telemetry) -> None:
        def rebuild() -> None:
            if runtime.running:
                self._build(runtime, telemetry)

        asyncio.get_running_loop().call_later(REBUILD_S, rebuild)
