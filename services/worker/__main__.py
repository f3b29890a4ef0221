"""Starts a worker: the engine first, then telemetry and the bus, then the actors.

The engine comes first because its process is forked from this one, and a fork is only safe while there is one thread.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, get_args

import msgspec
from millrace.actor.clock import unix_ns
from millrace.actor.config import load_config
from millrace.actor.deps import ActorDeps, actor_rng
from millrace.actor.effects import Effect
from millrace.actor.engine import (
    AddToEngine,
    CancelInEngine,
    Engine,
    EngineEvent,
    KvCommand,
    LimitStepInEngine,
    LoadInEngine,
)
from millrace.actor.errors import BusError, ConfigError, EngineStartFailed
from millrace.actor.loop import run_to_end
from millrace.actor.nearest_field import nearest_field
from millrace.actor.runtime_nats import ActorHandle, NatsRuntime
from millrace.contracts.status import EngineDescription
from millrace.hosting.service import masked
from millrace.telemetry import open_telemetry

from services.worker.actor import ACCEPTS, WorkerActor
from services.worker.build import WorkerOrigin, build
from services.worker.canary import Canary
from services.worker.config import EngineKind, WorkerConfig
from services.worker.draining import DRAINED
from services.worker.identity import Identity
from services.worker.metrics import WorkerCollector


class EngineLink:
    """Ties one engine to one actor: effects one way, events the other. Events before the actor exists are idle
    snapshots and are dropped.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.handle: ActorHandle | None = None
        self._canary: Canary | None = None

    async def start(self, config: WorkerConfig) -> EngineDescription:
        """Starts the engine, and asks it the canary's prompt where there is one."""
        info = await self.engine.start(self._hear)
        if config.canary.prompt:
            self._canary = Canary(config.canary, config.model_path)
            await self._canary.ask(self.engine)
            self._canary = None
        return info

    def _hear(self, event: EngineEvent) -> None:
        if self._canary is not None:
            self._canary.hear(event)
        if self.handle is not None:
            self.handle.deliver(event)

    def handlers(self) -> dict[type[Effect], Callable[[Any], None]]:
        return {
            AddToEngine: lambda effect: self.engine.add(effect.sequence),
            CancelInEngine: lambda effect: self.engine.cancel(effect.sequences),
            LimitStepInEngine: lambda effect: self.engine.limit_step(effect.tokens),
            LoadInEngine: lambda effect: self.engine.load_adapter(effect.name, effect.path),
            **dict.fromkeys(get_args(KvCommand), self.engine.move),
        }


def build_engine(config: WorkerConfig) -> Engine:
    """The engine behind one instance.

    Raises:
        ConfigError: its parameters are wrong.
    """
    if config.engine is EngineKind.MODELLED:
        return _modelled(config)
    if config.instances != 1:
        raise ConfigError(f"instances = {config.instances}: a vLLM worker has one engine; start more workers")
    from services.worker.vllm_engine import environment

    environment.prepare()
    # Imported here: it takes five seconds, and a modelled worker has no need of it.
    from services.worker.vllm_engine.engine import VllmEngine

    return VllmEngine(config)


def _modelled(config: WorkerConfig) -> Engine:
    from services.worker.modelled import ModelledConfig, ModelledLiveEngine, modelled_parameters

    try:
        modelled, parameters = msgspec.convert(config.modelled, ModelledConfig), modelled_parameters(config)
    except ValueError as error:  # msgspec's ValidationError is one
        raise ConfigError(f"modelled: {error}{nearest_field(str(error), ModelledConfig)}") from None
    moves = config.migration.enabled
    return ModelledLiveEngine(modelled, parameters, model=config.model, model_path=config.model_path, moves=moves)


async def serve(config: WorkerConfig) -> int:
    """Runs the worker until it has drained or its engine died; returns the exit code.

    Raises:
        EngineStartFailed: the engine did not start. BusError: the bus cannot be reached.
    """
    incarnation = unix_ns()
    links = [EngineLink(build_engine(config)) for _ in range(config.instances)]
    try:
        infos = [await link.start(config) for link in links]
        if config.worker_cores:
            os.sched_setaffinity(0, config.worker_cores)
        return await _serve_bus(config, incarnation, links, infos)
    finally:
        for link in links:
            await link.engine.stop()


async def _serve_bus(
    config: WorkerConfig, incarnation: int, links: list[EngineLink], infos: list[EngineDescription]
) -> int:
    telemetry = open_telemetry("worker", config.name, config.telemetry)
    try:
        telemetry.logger.info("starting", config=masked(config), engines=msgspec.to_builtins(infos))
        runtime = NatsRuntime(bus=config.bus, name=config.name, telemetry=telemetry, registry=telemetry.registry)
        await runtime.connect()
        origins = [
            _origin(config, name, incarnation, info) for name, info in zip(config.instance_names(), infos, strict=True)
        ]
        actors = [_actor(origin) for origin in origins]
        telemetry.registry.register(
            WorkerCollector(
                lambda: [(a.name, a.figures, a.reporter.snapshot, a.ledger.forgotten) for a in actors], config.model
            )
        )
        telemetry.serve_metrics()
        for actor, link in zip(actors, links, strict=True):
            link.handle = runtime.add(actor, accepts=ACCEPTS, handlers=link.handlers())
        reason = await runtime.run()
        telemetry.logger.info("stopped", reason=reason)
    finally:
        telemetry.close()
    return 0 if reason == DRAINED else 1


def _origin(config: WorkerConfig, name: str, incarnation: int, info: EngineDescription) -> WorkerOrigin:
    identity = Identity(
        instance=name,
        incarnation=incarnation,
        model=config.model,
        host=socket.gethostname(),
        pid=os.getpid(),
        shape=config.shape,
    )
    return WorkerOrigin(
        identity=identity,
        info=info,
        limits=config.limits,
        cluster=config.bus.cluster,
        migration=config.migration,
    )


def _actor(origin: WorkerOrigin) -> WorkerActor:
    identity = origin.identity
    rng = actor_rng(identity.instance, identity.incarnation)
    return build(origin, ActorDeps(incarnation=identity.incarnation, rng=rng))


def main() -> int:
    """Runs the worker of a configuration file; returns the exit code. What went wrong at start is said on stderr."""
    parser = argparse.ArgumentParser(prog="python -m services.worker")
    parser.add_argument("--config", required=True, help="TOML or JSON file, see services/worker/config.py")
    try:
        return run_to_end(serve(load_config(WorkerConfig, parser.parse_args().config)))
    except (ConfigError, BusError, EngineStartFailed) as error:
        sys.stderr.write(f"worker: {error}\n")
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as forked ones end: an interpreter with vLLM in it takes seconds to take itself down
