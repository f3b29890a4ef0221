"""A scenario's cluster: the services' own actors on a simulation, modelled engines behind the workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from millrace.actor.actor import Actor
from millrace.actor.config import BusConfig
from millrace.actor.engine import EngineInfo
from millrace.contracts.catalog import Role
from millrace.contracts.kv import KvEndpoint
from millrace.contracts.message import Body
from millrace.contracts.sequences import request_id_of
from millrace.contracts.subjects import Subjects
from millrace.enginemodel.scaling import ScaledStepTime
from millrace.enginemodel.scripted import ScriptedEngine
from millrace.enginemodel.steptime import StepTimeModel
from millrace.policies.dispatch.loading import load_policy
from millrace.sim.cluster import byte_vocabulary
from millrace.sim.engine_sim import SimulatedEngine
from millrace.sim.links import LinkModel
from millrace.sim.process import Handlers, SimActor, SimProcess
from millrace.sim.provisioning import HostShape, SimulatedHost
from millrace.sim.runtime_sim import MILLISECOND, SECOND, Simulation
from millrace.sim.scenarios import lengths_known, observer
from millrace.sim.scenarios.clients import CountingClients
from millrace.sim.scenarios.lengths_known import KnowingTagger
from millrace.sim.scenarios.migration import PREFIX
from millrace.sim.scenarios.observer import Observer, Sample
from millrace.sim.scenarios.spec import Group, ScenarioSpec
from millrace.sim.supervising import WATCH_NS, SimSupervisor
from services.coordinator.actor import ACCEPTS as COORDINATOR_ACCEPTS
from services.coordinator.actor import CoordinatorActor
from services.ingress.actor import ACCEPTS as INGRESS_ACCEPTS
from services.ingress.actor import IngressActor
from services.ingress.config import (
    ContinuationConfig,
    DispatchConfig,
    IngressConfig,
    LimitsConfig,
    TaggingConfig,
)
from services.ingress.metrics import IngressMetrics
from services.ingress.tokens.detokenizer import TextModel
from services.migrator.actor import ACCEPTS as MIGRATOR_ACCEPTS
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics
from services.tagger.actor import ACCEPTS as TAGGER_ACCEPTS
from services.tagger.actor import TaggerActor
from services.worker.actor import ACCEPTS as WORKER_ACCEPTS
from services.worker.actor import WorkerActor
from services.worker.config import WorkerLimits
from services.worker.reports import Identity

MODEL = "modelled"
CLUSTER = "sim"

#: From the start of the actors to the first possible arrival: leases, plans and summaries have gone round by then.
WARM_NS = 3 * SECOND

#: An idle worker speaks so often, ms: a third of the silence that would count as its death.
REPORT_MS_MAX = 500

#: Loads the step-time model of a group by its name or path.
StepTimes = Callable[[str], StepTimeModel]


class Fleet:
    """Composition root of one scenario.

    Attributes:
        simulation: Its clock and network.
        clients: Submit calls here.
        observer: What was heard of requests.
        samples: The engines, looked at now and then.
        metrics: Of all ingresses, in all incarnations.
        engines: Engine of each instance's present incarnation.
        network: Carries KV between them; None where nothing moves.
    """

    def __init__(self, spec: ScenarioSpec, *, step_times: StepTimes, truth: Callable[[str], int]) -> None:
        """Builds and starts everything.

        Args:
            truth: Output length of a request by its id, tokens.
        """
        self.spec = spec
        network = spec.network
        link = LinkModel(delay_ns=int(network.delay_us * 1000), jitter_ns=int(network.jitter_us * 1000))
        self._worker_link = LinkModel(
            delay_ns=int((network.delay_us + network.worker_delay_us) * 1000),
            jitter_ns=int((network.jitter_us + network.worker_jitter_us) * 1000),
        )
        self.simulation = Simulation(spec.seed, verify=False, link=link, invariants_every=0)
        self.subjects = Subjects(CLUSTER)
        self.begin_ns = self.simulation.now_ns + WARM_NS
        self.clients = CountingClients()
        self.engines: dict[str, SimulatedEngine] = {}
        self.network = spec.migration.network(self.simulation)
        self._policy = load_policy(spec.dispatch.policy)
        self._truth = truth
        self._text = TextModel(byte_vocabulary())
        self._models = {_set_name(group): _step_time(group, step_times) for group in spec.cluster.groups}
        self._groups: dict[str, Group] = {}
        self._roles: dict[Role, list[SimActor]] = {}
        self.observer = Observer(name="observer", cluster=CLUSTER, begin_ns=self.begin_ns, migrations=spec.migration.on)
        self.samples: list[Sample] = []
        self.metrics: list[IngressMetrics] = []
        self._build()
        self.simulation.after(WARM_NS, self._sample)
        self._host = self._provisioned() if spec.provisioning.on else None
        restart_ns = int(spec.cluster.restart_s * SECOND)
        self._supervisor = SimSupervisor(self.simulation, self.subjects, restart_after_ns=lambda: restart_ns)
        if spec.faults:
            self.simulation.after(WATCH_NS, self._watch)

    @property
    def ingresses(self) -> list[SimActor]:
        """All ingresses, running or not."""
        return self._roles[Role.INGRESS]

    def actors(self) -> dict[str, SimActor]:
        """Everything but the observer, by name."""
        return {actor.name: actor for actors in self._roles.values() for actor in actors}

    def _build(self) -> None:
        cluster = self.spec.cluster
        self.simulation.add(lambda _start: self.observer, node="observer", accepts=observer.ACCEPTS)
        for index in range(cluster.coordinators):
            self._add(Role.COORDINATOR, f"coordinator-{index}", self._coordinator, COORDINATOR_ACCEPTS)
        if self.spec.prediction.kind == "tagger":
            self._add(Role.TAGGER, "tagger-0", self._tagger, TAGGER_ACCEPTS)
        elif self.spec.prediction.kind != "none":
            self._add(Role.TAGGER, "tagger-0", self._knowing_tagger, lengths_known.ACCEPTS)
        if self._policy.ask is not None:
            from services.predictor.actor import ACCEPTS as PREDICTOR_ACCEPTS  # brings scipy, half a second of it

            for index in range(cluster.predictors):
                self._add(Role.PREDICTOR, f"predictor-{index}", self._predictor, PREDICTOR_ACCEPTS)
        for group in cluster.groups:
            for name in group.names():
                self._add_instance(name, group)
        for index in range(cluster.ingresses):
            self._add(Role.INGRESS, f"ingress-{index}", self._ingress, INGRESS_ACCEPTS, self.clients.handlers)

    def _add_instance(self, name: str, group: Group) -> SimActor:
        self._groups[name] = group
        worker = self._add(Role.WORKER, name, self._worker, WORKER_ACCEPTS, self._engine_handlers)
        if self.spec.migration.on:
            self._add(Role.MIGRATOR, PREFIX + name, self._migrator, MIGRATOR_ACCEPTS)
        return worker

    def _add(
        self,
        role: Role,
        name: str,
        build: Callable[[str, int], Actor],
        accepts: tuple[type[Body], ...],
        handlers: Callable[[SimProcess], Handlers] | None = None,
    ) -> SimActor:
        actor = self.simulation.add(
            lambda incarnation: build(name, incarnation), node=name, accepts=accepts, handlers=handlers
        )
        self._roles.setdefault(role, []).append(actor)
        if role is Role.WORKER:
            self.simulation.faults.change_link(name, self._worker_link)
        return actor

    # The services, as their __main__ builds them

    def _coordinator(self, name: str, incarnation: int) -> Actor:
        return CoordinatorActor(
            name=name,
            cluster=CLUSTER,
            incarnation=incarnation,
            provisioning=self.spec.provisioning.config(),
            roles=self.spec.migration.instance_roles(self.spec.instances()),
        )

    def _migrator(self, name: str, incarnation: int) -> Actor:
        return self.spec.migration.migrator(name, incarnation, cluster=CLUSTER, seed=self.spec.seed)

    def _tagger(self, name: str, incarnation: int) -> Actor:
        return TaggerActor(name=name, cluster=CLUSTER, incarnation=incarnation)

    def _knowing_tagger(self, name: str, incarnation: int) -> Actor:
        rng = Random(f"{self.spec.seed}/{name}/{incarnation}")
        prediction = self.spec.prediction
        sigma = prediction.sigma if prediction.kind == "noisy" else 0.0
        return KnowingTagger(name=name, cluster=CLUSTER, truth=self._truth, sigma=sigma, rng=rng)

    def _predictor(self, name: str, incarnation: int) -> Actor:
        from services.predictor.actor import PredictorActor

        shards, spec = self.spec.cluster.predictors, self.spec.cluster.predictor
        config = PredictorConfig(
            name=name,
            bus=BusConfig(cluster=CLUSTER),
            shard=int(name.rpartition("-")[2]),
            shards=shards,
            rule=spec.rule,
            default_output_tokens=spec.default_output_tokens,
            learn_lengths=spec.learn_lengths,
            calibrate=spec.calibrate,
            prefixes=spec.prefixes,
            transit_us=int(4 * self.spec.network.delay_us + self.spec.network.worker_delay_us),
        )
        return PredictorActor(
            config=config, incarnation=incarnation, step_times=self._models, metrics=PredictorMetrics()
        )

    def _worker(self, name: str, incarnation: int) -> Actor:
        group, intervals = self._groups[name], self.spec.intervals
        return WorkerActor(
            identity=Identity(instance=name, incarnation=incarnation, model=MODEL, host=group.host),
            info=_info(group, self._endpoint(name, incarnation)),
            subjects=self.subjects,
            limits=WorkerLimits(
                queue_max=self.spec.cluster.queue_max,
                status_interval_min_ms=intervals.status_ms,
                summary_interval_min_ms=intervals.summary_ms,
                report_interval_max_ms=REPORT_MS_MAX,
            ),
            rng=Random(f"{self.spec.seed}/{name}/{incarnation}"),
            migration=self.spec.migration.worker_bounds(),
        )

    def _engine_handlers(self, process: SimProcess) -> Handlers:
        group, intervals = self._groups[process.name], self.spec.intervals
        modelled = ScriptedEngine(
            group.engine,
            self._models[_set_name(group)],
            output_length=self._output_length,
            tell_interval_ns=intervals.token_ms * MILLISECOND if intervals.token_ms else None,
            kv=self._endpoint(process.name, process.incarnation),
        )
        if group.host and group.neighbour_slowdown:
            modelled.slowed = partial(self._slowed, process.name)
        engine = SimulatedEngine(
            process,
            modelled,
            snapshot_interval_ns=min(intervals.status_ms, intervals.summary_ms) * MILLISECOND,
            run_ns_max=intervals.run_ms * MILLISECOND,
            network=self.network,
        )
        self.engines[process.name] = engine
        return engine.handlers()

    def _slowed(self, name: str) -> float:
        """How many times as long a step takes that this instance begins now, for those who compute on the same host."""
        own = self._groups[name]
        others = [other for other, group in self._groups.items() if group.host == own.host and other != name]
        return 1 + own.neighbour_slowdown * sum(self._computes(other) for other in others)

    def _computes(self, name: str) -> bool:
        engine, actor = self.engines.get(name), self.simulation.actors.get(name)
        running = actor is not None and actor.process is not None
        return running and engine is not None and engine.engine.scheduler.has_work()

    def _endpoint(self, name: str, incarnation: int) -> KvEndpoint | None:
        return self.spec.migration.endpoint(self._groups[name].engine, key=f"{name}/{incarnation}", model=MODEL)

    def _output_length(self, sequence: str) -> int:
        return self._truth(request_id_of(sequence))

    def _ingress(self, name: str, incarnation: int) -> Actor:
        spec = self.spec
        config = IngressConfig(
            name=name,
            bus=BusConfig(cluster=CLUSTER),
            limits=LimitsConfig(calls_open_max=1 << 40, sequences_open_max=1 << 40, call_timeout_s=spec.limit_s * 10),
            dispatch=DispatchConfig(policy=spec.dispatch.policy, parameters=spec.dispatch.parameters),
            tagging=TaggingConfig(mode="never" if spec.prediction.kind == "none" else "needed"),
            continuation=ContinuationConfig(stall_s=spec.cluster.stall_s, queue_stall_s=spec.cluster.stall_s),
        )
        self.metrics.append(IngressMetrics())
        return IngressActor(
            config=config,
            incarnation=incarnation,
            models={MODEL: self._text},
            metrics=self.metrics[-1],
            rng=Random(f"{spec.seed}/{name}/{incarnation}"),
            policy=self._policy,
        )

    # What is seen from outside

    def fallbacks(self) -> int:
        """Decisions of all ingresses that were made without the predictions that the policy asked for."""
        return sum(metrics.fallbacks.total() for metrics in self.metrics)

    def _sample(self) -> None:
        """Looks at every engine that runs; none of them notices."""
        at_ns = self.simulation.now_ns - self.begin_ns
        running = {name: actor for name, actor in self.simulation.actors.items() if actor.process is not None}
        self.samples += [_sampled(at_ns, name, self.engines[name]) for name in running if name in self.engines]
        self.simulation.after(self.spec.intervals.sample_ms * MILLISECOND, self._sample)

    # The supervisor

    def _provisioned(self) -> SimulatedHost:
        """What adds instances like those of the first group, and stops any; workers are its to restart."""
        workers = {actor.name: actor for actor in self._roles[Role.WORKER]}
        shape = HostShape(
            cluster=CLUSTER,
            model=MODEL,
            running=tuple(workers),
            spares=self.spec.spares(),
            cold_start_ns=int(self.spec.provisioning.cold_start_s * SECOND),
        )
        return SimulatedHost(self.simulation, shape, workers=workers, add_worker=self._add_worker)

    def _add_worker(self, name: str) -> SimActor:
        return self._add_instance(name, self.spec.cluster.groups[0])

    def _watch(self) -> None:
        """Says who died, and starts it again after a while."""
        self._supervisor.look(
            (role, actor)
            for role, actors in self._roles.items()
            if role is not Role.WORKER or self._host is None
            for actor in actors
        )
        self.simulation.after(WATCH_NS, self._watch)


def _sampled(at_ns: int, name: str, engine: SimulatedEngine) -> Sample:
    scheduler = engine.engine.scheduler
    pool = scheduler.pool
    return Sample(
        at_ns,
        name,
        len(scheduler.running),
        len(scheduler.waiting) + len(scheduler.arrived),
        pool.blocks_total - pool.free,
        pool.blocks_total,
        scheduler.preemptions,
        engine.engine.output_tokens,
    )


def _set_name(group: Group) -> str:
    """What instances of a group say of their step times, and predictors find them by."""
    return group.step_time if group.speed == 1.0 else f"{group.step_time} at speed {group.speed:g}"


def _step_time(group: Group, step_times: StepTimes) -> StepTimeModel:
    model = step_times(group.step_time)
    return model if group.speed == 1.0 else ScaledStepTime(model=model, factor=1 / group.speed)


def _info(group: Group, kv: KvEndpoint | None) -> EngineInfo:
    engine = group.engine
    shared = {name: getattr(engine, name) for name in EngineInfo.__struct_fields__ if hasattr(engine, name)}
    info = msgspec.convert(
        {
            **shared,
            "engine": "modelled",
            "engine_version": "1",
            "model": MODEL,
            "queue_policy": engine.policy.value,
            "step_time": _set_name(group),
        },
        EngineInfo,
    )
    return msgspec.structs.replace(info, kv=kv)
