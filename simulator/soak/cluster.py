"""The soak's cluster: alike workers whose engines generate text that clients can check, and clients that do."""

from __future__ import annotations

from random import Random
from typing import ClassVar
from zlib import crc32

from millrace.contracts.catalog import Role
from millrace.contracts.kv import KvEndpoint
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import modelled_endpoint
from millrace.sim.engine_sim import SimulatedEngine
from millrace.sim.kv_network import SimKvNetwork
from millrace.sim.links import LinkModel
from millrace.sim.process import SimActor, SimProcess
from millrace.sim.runtime_sim import Simulation

from services.broker.config import BrokerConfig, FenceConfig, TradingConfig
from services.coordinator.config import CoordinatorConfig
from services.ingress.config import DispatchConfig, IngressConfig, LimitsConfig
from services.ingress.tokens.detokenizer import TextModel
from services.migrator.config import MigratorConfig, ReplicaConfig
from services.predictor.config import PredictorConfig
from services.tagger.config import NO_TRAINING, TaggerConfig
from services.worker.config import MigrationConfig, ReplicaBounds, WorkerLimits
from simulator import services
from simulator.cluster import BUS, CLUSTER, SimulatedCluster
from simulator.policy_faults import PolicyFaultSink
from simulator.process_restarter import WATCH_NS
from simulator.services import SimInstance, SimService
from simulator.soak import restless_planner
from simulator.soak.clients import Clients
from simulator.soak.oracle import RUN_NS, Oracle
from simulator.soak.restless_planner import RestlessConfig
from simulator.soak.shape import MODEL, REPLICAS_IN_MAX, REPLICAS_OUT_MAX, SoakShape, TradingShape
from simulator.soak.wrong_estimates import wrong
from simulator.vocabulary import EOS, byte_vocabulary, spoken_vocabulary


class SoakCluster(SimulatedCluster):
    """A cluster of a shape.

    Attributes:
        clients: Submit calls here; they check what comes.
        restarted_elsewhere: Roles whose actors are restarted elsewhere.
    """

    restarted_elsewhere: ClassVar[frozenset[Role]] = frozenset()

    def __init__(self, seed: int, shape: SoakShape, *, link: LinkModel | None = None, verify: bool = True) -> None:
        """Builds and starts everything. ``verify``: as for ``Simulation``."""
        simulation = Simulation(seed, verify=verify, link=link, cluster=CLUSTER, telemetry=PolicyFaultSink())
        wire = shape.migration
        network = None
        if wire is not None:
            network = SimKvNetwork(simulation, bytes_per_s=wire.bytes_per_s, latency_ns=wire.latency_ns)
        super().__init__(simulation, network=network)
        self.shape = shape
        self._text = TextModel(byte_vocabulary(), frozenset({EOS}))
        self._words = spoken_vocabulary(self._text.vocabulary)
        self._oracle = Oracle(self._undisturbed_engine, self._text.vocabulary, self._words)
        self.clients = Clients(self._oracle)
        self._choose_services()
        self._add_actors()
        rng = Random(f"{seed}/supervisor")
        self.restart_dead(lambda: rng.randrange(*shape.restart_ns), but=self.restarted_elsewhere)
        simulation.after(WATCH_NS, self._lose_connections)

    def models(self) -> tuple[str, ...]:
        """Models that its workers serve."""
        return (MODEL,)

    def present_workers(self) -> list[SimActor]:
        """Workers that run or are being restarted."""
        return self.workers

    def _choose_services(self) -> None:
        self.services |= {
            Role.COORDINATOR: services.coordinator(),
            Role.TAGGER: services.tagger(),
            Role.MIGRATOR: services.migrator(),
            Role.BROKER: services.broker({MODEL: self.shape.step_time}),
            Role.WORKER: services.worker(CLUSTER, self.make_engine, self._endpoint, self.engines),
            Role.INGRESS: services.ingress({MODEL: self._text}, self.clients.handlers),
        }
        if self.shape.trading is not None:
            self.services[Role.COORDINATOR] = SimService(restless_planner.ACCEPTS, restless_planner.build)
        if self.shape.predictors:
            self.services[Role.PREDICTOR] = services.predictor({MODEL: self.shape.step_time})

    def _add_actors(self) -> None:
        shape, add = self.shape, self.add
        self._add_coordinators()
        for index in range(shape.taggers):
            add(Role.TAGGER, TaggerConfig(name=f"tagger-{index}", bus=BUS, learning=NO_TRAINING))
        for index in range(shape.predictors):
            add(Role.PREDICTOR, PredictorConfig(name=f"predictor-{index}", bus=BUS))
        for index in range(shape.workers):
            add(Role.WORKER, self._instance(f"w{index}"))
        for index in range(shape.ingresses):
            add(Role.INGRESS, self._ingress(f"ingress-{index}"))
        for index in range(shape.workers if shape.migration else 0):
            add(Role.MIGRATOR, self._migrator(f"w{index}"))
            add(Role.BROKER, self._broker(f"w{index}"))

    def _add_coordinators(self) -> None:
        shape = self.shape
        if shape.trading is not None:
            self.add(Role.COORDINATOR, self._planner(shape.trading))
        for index in range(shape.coordinators if shape.trading is None else 0):
            self.add(Role.COORDINATOR, self._coordinator(f"coordinator-{index}"))

    def _instance(self, name: str) -> SimInstance:
        limits = WorkerLimits(queue_max=self.shape.queue_max, drain_limit_ms=1_500)
        share = 0.3 if self.shape.migration is not None and self.shape.migration.replicas else 0.0
        return SimInstance(
            name=name,
            model=MODEL,
            engine=self.shape.engine,
            step_time=self.shape.planned_as or MODEL,
            limits=limits,
            migration=MigrationConfig(
                replicas=ReplicaBounds(memory_share=share, count_max=REPLICAS_IN_MAX, hold_ms=5_000)
            ),
        )

    def _migrator(self, instance: str) -> MigratorConfig:
        """A migrator whose replicas suit short sequences."""
        assert self.shape.migration is not None
        replicas = ReplicaConfig(
            enabled=self.shape.migration.replicas, tokens_min=32, per_instance_max=REPLICAS_OUT_MAX, interval_ms=100
        )
        return MigratorConfig(name=f"migrator-{instance}", instances=[instance], bus=BUS, replicas=replicas)

    def _coordinator(self, name: str) -> CoordinatorConfig:
        roles = self.shape.migration.roles if self.shape.migration else {}
        return CoordinatorConfig(name=name, bus=BUS, roles=roles, stages=self.shape.stages)

    def _ingress(self, name: str) -> IngressConfig:
        shape = self.shape
        return IngressConfig(
            name=name,
            bus=BUS,
            limits=LimitsConfig(calls_open_max=shape.calls_open_max, call_timeout_s=shape.call_timeout_s),
            dispatch=DispatchConfig(policy=shape.policy),
        )

    def _planner(self, trading: TradingShape) -> RestlessConfig:
        return RestlessConfig(
            name="coordinator-0",
            model=MODEL,
            cuts=trading.cuts,
            period_ns=trading.plan_ns,
            stages_max=trading.stages_max,
        )

    def _broker(self, instance: str) -> BrokerConfig:
        """A broker that lets short sequences move: those of the soak last a second or two."""
        shape = self.shape.trading
        trading = TradingConfig()
        if shape is not None:
            trading = TradingConfig(policy=shape.policy, parameters=shape.parameters, reasons=shape.reasons)
        fences = FenceConfig(payback_factor=1, decoded_min=8, plan_pause_ms=500)
        return BrokerConfig(name=f"broker-{instance}", instances=[instance], bus=BUS, trading=trading, fences=fences)

    def make_engine(self, instance: SimInstance, process: SimProcess) -> SimulatedEngine:
        """The engine of a worker's incarnation. Without a sampling seed it generates a text of its own."""
        engine = self._modelled_engine(self._endpoint(instance, process.incarnation))
        engine.moves.leases.verify = self.shape.migration is None or self.shape.migration.verify
        engine.noise = crc32(f"{process.name}/{process.incarnation}".encode())
        self._oracle.noises.append(engine.noise)
        if self.shape.trading is not None and self.shape.trading.wrong_estimates:
            engine.estimated = wrong
        self.change_engine(engine)
        return SimulatedEngine(process, engine, network=self.network)

    def change_engine(self, engine: ModelledEngine) -> None:
        """Does nothing. Tests override it, to have an engine do something wrong."""

    def _endpoint(self, instance: SimInstance, incarnation: int) -> KvEndpoint | None:
        if self.shape.migration is None:
            return None
        return modelled_endpoint(instance.engine, key=f"{instance.name}/{incarnation}", model=MODEL)

    def _modelled_engine(self, kv: KvEndpoint | None = None, *, tell_interval_ns: int | None = None) -> ModelledEngine:
        shape = self.shape
        return ModelledEngine(
            shape.engine,
            shape.step_time,
            vocabulary=self._words,
            lengths=shape.lengths,
            kv=kv,
            tell_interval_ns=tell_interval_ns,
        )

    def _undisturbed_engine(self) -> ModelledEngine:
        return self._modelled_engine(tell_interval_ns=RUN_NS)

    def _lose_connections(self) -> None:
        self.clients.lose_connections()
        self.simulation.after(WATCH_NS, self._lose_connections)
