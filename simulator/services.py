"""Builds and hosts the actors of each role in a simulated cluster, with the ``build`` of their services.

To add a service: a function here that returns its SimService, and a line where a cluster chooses its services
(scenarios/cluster.py, soak/cluster.py). See README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.contracts.kv import KvEndpoint
from millrace.contracts.message import Body
from millrace.contracts.scheduler import scheduler_fields
from millrace.contracts.status import EngineDescription
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.hosting.step_times import StepTimeDeps
from millrace.sim.engine_sim import SimulatedEngine
from millrace.sim.process import Handlers, SimProcess

from services.broker.actor import ACCEPTS as BROKER_ACCEPTS
from services.broker.build import build as build_broker
from services.coordinator.build import ACCEPTS as COORDINATOR_ACCEPTS
from services.coordinator.build import CoordinatorDeps
from services.coordinator.build import build as build_coordinator
from services.ingress.actor import ACCEPTS as INGRESS_ACCEPTS
from services.ingress.build import build as build_ingress
from services.ingress.state import IngressDeps
from services.ingress.tokens.detokenizer import TextModel
from services.migrator.actor import ACCEPTS as MIGRATOR_ACCEPTS
from services.migrator.build import build as build_migrator
from services.tagger.actor import ACCEPTS as TAGGER_ACCEPTS
from services.tagger.build import build as build_tagger
from services.worker.actor import ACCEPTS as WORKER_ACCEPTS
from services.worker.build import WorkerOrigin
from services.worker.build import build as build_worker
from services.worker.config import MigrationConfig, WorkerLimits
from services.worker.identity import Identity


class SimService(NamedTuple):
    """One kind of actor in a simulated cluster.

    Attributes:
        accepts: Wire types that reach it.
        build: Builds the actor from its configuration, which has a ``name``, and what all services share.
        handlers: Carries out effects of the service's own, for one incarnation; None where it has none.
    """

    accepts: tuple[type[Body], ...]
    build: Callable[[Any, ActorDeps], Actor]
    handlers: Callable[[Any, SimProcess], Handlers] | None = None


class SimInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker with its modelled engine.

    Attributes:
        host: Machine that it says it runs on; empty if unknown.
        moves: Whether its sequences may move to others.
        shape: What it says that it runs on.
    """

    name: str
    model: str
    engine: EngineParameters
    step_time: str
    limits: WorkerLimits
    host: str = ""
    shape: str = ""
    migration: MigrationConfig = MigrationConfig()


#: Makes the engine of an instance's incarnation.
MakeEngine = Callable[[SimInstance, SimProcess], SimulatedEngine]
#: Where the KV of an instance's incarnation (unix ns) lies; None where nothing moves.
EndpointOf = Callable[[SimInstance, int], KvEndpoint | None]


def coordinator(step_times: Mapping[str, StepTimeModel] = MappingProxyType({})) -> SimService:
    """Configured by a CoordinatorConfig. ``step_times``: by the name that instances give."""
    return SimService(
        COORDINATOR_ACCEPTS,
        lambda config, deps: build_coordinator(config, CoordinatorDeps(**vars(deps), step_times=step_times)),
    )


def tagger() -> SimService:
    """Configured by a TaggerConfig."""
    return SimService(TAGGER_ACCEPTS, build_tagger)


def migrator() -> SimService:
    """Configured by a MigratorConfig."""
    return SimService(MIGRATOR_ACCEPTS, build_migrator)


def broker(step_times: Mapping[str, StepTimeModel]) -> SimService:
    """Configured by a BrokerConfig. ``step_times``: by the name that instances give."""
    return SimService(
        BROKER_ACCEPTS, lambda config, deps: build_broker(config, StepTimeDeps(**vars(deps), step_times=step_times))
    )


def predictor(step_times: Mapping[str, StepTimeModel]) -> SimService:
    """Configured by a PredictorConfig. ``step_times``: by the name that instances give."""
    # Brings scipy, half a second of it, which a cluster without predictors does not need.
    from services.predictor.actor import ACCEPTS
    from services.predictor.build import build

    return SimService(ACCEPTS, lambda config, deps: build(config, StepTimeDeps(**vars(deps), step_times=step_times)))


def ingress(models: Mapping[str, TextModel], handlers: Callable[[SimProcess], Handlers]) -> SimService:
    """Configured by an IngressConfig. ``handlers``: of the simulated clients, which stand in for the HTTP side."""
    return SimService(
        INGRESS_ACCEPTS,
        lambda config, deps: build_ingress(config, IngressDeps(**vars(deps), models=models)),
        lambda _config, process: handlers(process),
    )


def worker(
    cluster: str, make_engine: MakeEngine, endpoint_of: EndpointOf, engines: MutableMapping[str, SimulatedEngine]
) -> SimService:
    """Configured by an Instance. ``engines``: gets the engine of each instance's present incarnation."""

    def build(instance: SimInstance, deps: ActorDeps) -> Actor:
        identity = Identity(
            instance=instance.name,
            incarnation=deps.incarnation,
            model=instance.model,
            host=instance.host,
            shape=instance.shape,
        )
        origin = WorkerOrigin(
            identity=identity,
            info=_info(instance, endpoint_of(instance, deps.incarnation)),
            limits=instance.limits,
            cluster=cluster,
            migration=instance.migration,
        )
        return build_worker(origin, deps)

    def handlers(instance: SimInstance, process: SimProcess) -> Handlers:
        engine = engines[process.name] = make_engine(instance, process)
        return engine.handlers()

    return SimService(WORKER_ACCEPTS, build, handlers)


def _info(instance: SimInstance, kv: KvEndpoint | None) -> EngineDescription:
    """Return the engine information of an instance's modelled engine."""
    return EngineDescription(
        engine="modelled",
        engine_version="1",
        model=instance.model,
        step_time=instance.step_time,
        kv=kv,
        **scheduler_fields(instance.engine),
    )
