"""A scenario's cluster: instances in groups, modelled engines that know how long each output is, clients that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Literal

from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.contracts.catalog import Role
from millrace.contracts.kv import KvEndpoint
from millrace.enginemodel.scripted import ScriptedEngine
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.policies.dispatch import DISPATCH_POLICIES
from millrace.policies.registry import Policy, Registry
from millrace.sim.engine_sim import SimulatedEngine
from millrace.sim.links import LinkModel
from millrace.sim.process import SimActor, SimProcess
from millrace.sim.runtime_sim import MILLISECOND, SECOND, Simulation

from services.broker.actor import BrokerActor
from services.coordinator.config import CoordinatorConfig
from services.ingress.actor import IngressActor
from services.ingress.config import (
    ContinuationConfig,
    DispatchConfig,
    IngressConfig,
    LimitsConfig,
    TaggingConfig,
)
from services.ingress.tokens.detokenizer import TextModel
from services.predictor.config import PredictorConfig
from services.tagger.config import NO_TRAINING, TaggerConfig
from services.worker.config import WorkerLimits
from simulator import services
from simulator.cluster import BUS, CLUSTER, SimulatedCluster
from simulator.host import HostShape, SimulatedHost
from simulator.policy_faults import PolicyFaultSink
from simulator.scenarios import lengths_known, observer
from simulator.scenarios.counting_clients import CountingClients
from simulator.scenarios.lengths_known import Expected, KnowingTagger
from simulator.scenarios.observer import EngineSample, Observer
from simulator.scenarios.spec import Group, ScenarioSpec
from simulator.services import SimInstance, SimService
from simulator.vocabulary import byte_vocabulary

#: From the start of the actors to the first possible arrival: leases, plans and summaries have gone round by then.
WARM_NS = 3 * SECOND

#: An idle worker speaks so often, ms: a third of the silence that would count as its death.
REPORT_MS_MAX = 500

#: Loads the step-time model of a group by its name or path.
StepTimes = Callable[[str], LinearStepTime]


class ScenarioCluster(SimulatedCluster):
    """The cluster of one scenario.

    Attributes:
        begin_ns: First possible arrival, unix ns of virtual time.
        clients: Submit calls here.
        samples: The engines, looked at now and then.
    """

    def __init__(
        self,
        spec: ScenarioSpec,
        *,
        step_times: StepTimes,
        truth: Callable[[str, str], int],
        expected: Expected | None = None,
        clients: CountingClients | None = None,
        harmed: bool = False,
    ) -> None:
        """Builds and starts everything.

        Args:
            truth: Output length of a request, by its id and the model, tokens.
            expected: What a recorded tagger said.
            harmed: Whether faults come that the scenario does not name.
        """
        network = spec.network
        link = self._link = LinkModel(delay_ns=int(network.delay_us * 1000), jitter_ns=int(network.jitter_us * 1000))
        self._worker_link = LinkModel(
            delay_ns=int((network.delay_us + network.worker_delay_us) * 1000),
            jitter_ns=int((network.jitter_us + network.worker_jitter_us) * 1000),
        )
        simulation = Simulation(
            spec.seed,
            verify=False,
            link=link,
            invariants_every=0,
            cluster=CLUSTER,
            telemetry=PolicyFaultSink(),
        )
        super().__init__(simulation, network=spec.migration.network(simulation))
        self.spec = spec
        self.begin_ns = simulation.now_ns + WARM_NS
        self.clients = clients or CountingClients()
        self.observer = Observer(
            name="observer",
            cluster=CLUSTER,
            begin_ns=self.begin_ns,
            migrations=spec.migration.on,
        )
        self.samples: list[EngineSample] = []
        self._truth = truth
        self._expected = expected or truth
        self._asks = DISPATCH_POLICIES.load(spec.dispatch.policy).ask is not None
        self._models = {_set_name(group): _step_time(group, step_times) for group in spec.cluster.groups}
        told = {group.told_step_time for group in spec.cluster.groups} - {""}
        self._told = self._models | {name: step_times(name) for name in sorted(told)}
        self._groups: dict[str, Group] = {}
        self._unserved: list[str] = []  # instances without a migrator
        self._ingress_actors: list[IngressActor] = []
        self._broker_actors: list[BrokerActor] = []
        self._choose_services()
        self._add_actors()
        simulation.after(WARM_NS, self._sample)
        simulation.nats.quiet = not (spec.faults or harmed)
        host = self._provisioned() if spec.spare_groups() or spec.provisioning.strategy != "none" else None
        if spec.faults or harmed:
            restart_ns = int(spec.cluster.restart_s * SECOND)
            self.restart_dead(lambda: restart_ns, but=(Role.WORKER,) if host is not None else ())

    def _choose_services(self) -> None:
        tagger, text = services.tagger(), TextModel(byte_vocabulary())
        if self.spec.prediction.kind != "tagger":
            tagger = SimService(lengths_known.ACCEPTS, self._knowing_tagger)
        self.services |= {
            Role.COORDINATOR: services.coordinator(self._told),
            Role.TAGGER: tagger,
            Role.MIGRATOR: services.migrator(),
            Role.BROKER: services.broker(self._told),
            Role.WORKER: services.worker(CLUSTER, self._make_engine, self._endpoint, self.engines),
            Role.INGRESS: services.ingress(dict.fromkeys(self.spec.models(), text), self.clients.handlers),
        }
        if self._asks:
            self.services[Role.PREDICTOR] = services.predictor(self._told)

    def _add_actors(self) -> None:
        cluster, add = self.spec.cluster, self.add
        self.simulation.add(lambda _start: self.observer, node="observer", accepts=observer.ACCEPTS, role=Role.OBSERVER)
        for index in range(cluster.coordinators):
            add(Role.COORDINATOR, self._coordinator(f"coordinator-{index}"))
        if self.spec.prediction.kind != "none":
            add(Role.TAGGER, TaggerConfig(name="tagger-0", bus=BUS, learning=NO_TRAINING))
        for index in range(cluster.predictors if self._asks else 0):
            add(Role.PREDICTOR, self._predictor(index))
        for group in cluster.groups:
            for name in group.names():
                self._add_instance(name, group)
        self._add_movers()
        for index in range(cluster.ingresses):
            add(Role.INGRESS, self._ingress(f"ingress-{index}"))

    def _add_instance(self, name: str, group: Group) -> SimActor:
        self._groups[name] = group
        worker = self.add(Role.WORKER, self._instance(name, group))
        self.simulation.faults.change_link(name, self._worker_link)
        self._unserved.append(name)
        if len(self._unserved) >= self.spec.migration.instances_each:
            self._add_movers()
        return worker

    def link_of(self, name: str) -> LinkModel:
        """The undisturbed link of an actor's node."""
        return self._worker_link if name in self._groups else self._link

    def _add_movers(self) -> None:
        """Adds a migrator and a broker for the instances that have none."""
        names, self._unserved = self._unserved, []
        if self.spec.migration.on and names:
            self.add(Role.MIGRATOR, self.spec.migration.migrator(names, BUS))
            self.add(Role.BROKER, self.spec.trading.broker(names, BUS))

    # Configurations

    def _coordinator(self, name: str) -> CoordinatorConfig:
        roles = self.spec.migration.instance_roles(self.spec.instances())
        return CoordinatorConfig(
            name=name,
            bus=BUS,
            provisioning=self.spec.provisioning,
            stages=self.spec.stages,
            roles=roles,
            flips=self.spec.roles,
            step_bounds=self.spec.step_bounds,
        )

    def _predictor(self, index: int) -> PredictorConfig:
        spec, network = self.spec.cluster.predictor, self.spec.network
        return PredictorConfig(
            name=f"predictor-{index}",
            bus=BUS,
            shard=index,
            shards=self.spec.cluster.predictors,
            default_output_tokens=spec.default_output_tokens,
            learn_lengths=spec.learn_lengths,
            calibrate=spec.calibrate,
            prefixes=spec.prefixes,
            transit_us=int(4 * network.delay_us + network.worker_delay_us),
        )

    def _instance(self, name: str, group: Group) -> SimInstance:
        intervals = self.spec.intervals
        limits = WorkerLimits(
            queue_max=self.spec.cluster.queue_max,
            status_interval_min_ms=intervals.status_ms,
            summary_interval_min_ms=intervals.summary_ms,
            report_interval_max_ms=REPORT_MS_MAX,
        )
        return SimInstance(
            name=name,
            model=group.model,
            host=group.host_of(name),
            engine=group.engine,
            step_time=group.told_step_time or _set_name(group),
            shape=group.shape or group.name,
            limits=limits,
            migration=self.spec.migration.worker_bounds(),
        )

    def _ingress(self, name: str) -> IngressConfig:
        spec = self.spec
        return IngressConfig(
            name=name,
            bus=BUS,
            limits=LimitsConfig(calls_open_max=1 << 40, call_timeout_s=spec.limit_s * 10),
            dispatch=DispatchConfig(
                policy=spec.dispatch.policy, parameters=spec.dispatch.parameters, stage_by=spec.dispatch.stage_by
            ),
            tagging=TaggingConfig(mode=self._tagging()),
            continuation=ContinuationConfig(stall_s=spec.cluster.stall_s, queue_stall_s=spec.cluster.stall_s),
        )

    def _tagging(self) -> Literal["always", "needed", "never"]:
        if self.spec.prediction.kind == "none":
            return "never"
        return "always" if self.spec.dispatch.stage_by == "expected" else self.spec.prediction.asked

    # Engines

    def _make_engine(self, instance: SimInstance, process: SimProcess) -> SimulatedEngine:
        group, intervals = self._groups[instance.name], self.spec.intervals
        modelled = ScriptedEngine(
            instance.engine,
            self._models[_set_name(group)],
            output_length=partial(self._output_length, instance.model),
            tell_interval_ns=intervals.token_ms * MILLISECOND if intervals.token_ms else None,
            kv=self._endpoint(instance, process.incarnation),
        )
        if instance.host and group.neighbour_slowdown:
            modelled.slowed = partial(self._slowed, instance.name)
        return SimulatedEngine(
            process,
            modelled,
            snapshot_interval_ns=min(intervals.status_ms, intervals.summary_ms) * MILLISECOND,
            run_ns_max=intervals.run_ms * MILLISECOND,
            network=self.network,
        )

    def _slowed(self, name: str) -> float:
        """Return the factor by which others that compute on its host slow down a step that this instance begins now."""
        own = self._groups[name]
        host = own.host_of(name)
        others = [other for other, group in self._groups.items() if group.host_of(other) == host and other != name]
        return 1 + own.neighbour_slowdown * sum(self._computes(other) for other in others)

    def _computes(self, name: str) -> bool:
        engine, actor = self.engines.get(name), self.simulation.actors.get(name)
        running = actor is not None and actor.process is not None
        return running and engine is not None and engine.engine.scheduler.has_work()

    def _endpoint(self, instance: SimInstance, incarnation: int) -> KvEndpoint | None:
        key = f"{instance.name}/{incarnation}"
        return self.spec.migration.endpoint(instance.engine, key=key, model=instance.model, host=instance.host)

    def _output_length(self, model: str, sequence: str) -> int:
        return self._truth(sequence.rpartition(".")[0], model)

    def _knowing_tagger(self, config: TaggerConfig, deps: ActorDeps) -> Actor:
        prediction = self.spec.prediction
        sigma = prediction.sigma if prediction.kind == "noisy" else 0.0
        truth = self._expected if prediction.kind == "recorded" else self._truth
        return KnowingTagger(name=config.name, cluster=CLUSTER, truth=truth, sigma=sigma, rng=deps.rng)

    # What is seen from outside

    def build_actor(self, role: Role, config: object, deps: ActorDeps) -> Actor:
        """Keeps every incarnation of an ingress and of a broker, for their counts."""
        actor = super().build_actor(role, config, deps)
        if isinstance(actor, IngressActor):
            self._ingress_actors.append(actor)
        if isinstance(actor, BrokerActor):
            self._broker_actors.append(actor)
        return actor

    def fallbacks(self) -> int:
        """Decisions of all ingresses that were made without the predictions that the policy asked for."""
        return sum(actor.state.metrics.fallbacks.total() for actor in self._ingress_actors)

    def trades(self) -> dict[str, int]:
        """Counters of all brokers: ``ask REASON``, ``answer HOW``, ``ended REASON HOW``, ``boundary HOW``."""
        counts: Counter[str] = Counter()
        for actor in self._broker_actors:
            metrics = actor.metrics
            counts.update({f"ask {reason}": count for reason, count in metrics.asks.plain().items()})
            counts.update({f"answer {how}": count for how, count in metrics.bids.plain().items()})
            counts.update({f"ended {reason} {how}": count for (reason, how), count in metrics.ended.counts.items()})
            counts.update({f"boundary {how}": count for how, count in metrics.boundaries.plain().items()})
        return dict(sorted(counts.items()))

    def _sample(self) -> None:
        """Looks at every engine that runs; none of them notices."""
        at_ns = self.simulation.now_ns - self.begin_ns
        running = {name: actor for name, actor in self.simulation.actors.items() if actor.process is not None}
        self.samples += [_sampled(at_ns, name, self.engines[name]) for name in running if name in self.engines]
        self.simulation.after(self.spec.intervals.sample_ms * MILLISECOND, self._sample)

    # Instances that come and go

    def _provisioned(self) -> SimulatedHost:
        """Build the host that adds spare instances, stops any, and restarts workers."""
        workers = {actor.name: actor for actor in self.workers}
        spares = self.spec.spare_groups()
        kinds = {name: (group.model, group.shape or group.name) for name, group in (self._groups | spares).items()}
        shape = HostShape(
            cluster=CLUSTER,
            model=self.spec.cluster.groups[0].model,
            running=tuple(workers),
            spares=tuple(spares),
            kinds=kinds,
            cold_start_ns=int(self.spec.cluster.cold_start_s * SECOND),
        )
        return SimulatedHost(self.simulation, shape, workers=workers, add_worker=self._add_worker)

    def _add_worker(self, name: str) -> SimActor:
        worker = self._add_instance(name, self.spec.spare_groups()[name])
        self._add_movers()
        return worker


class ClusterPolicy(Policy, frozen=True, kw_only=True):
    """A file that builds a scenario's cluster in its own way.

    Attributes:
        cluster: A subclass of ScenarioCluster.
    """

    cluster: type[ScenarioCluster]


CLUSTERS = Registry("cluster", ClusterPolicy, ())


def cluster_of(spec: ScenarioSpec) -> type[ScenarioCluster]:
    """The class of a scenario's cluster. Raises PolicyError where the file of its extension has none."""
    return CLUSTERS.choose(spec.extension, {}, key="extension")[0].cluster if spec.extension else ScenarioCluster


def _sampled(at_ns: int, name: str, engine: SimulatedEngine) -> EngineSample:
    scheduler = engine.engine.scheduler
    pool = scheduler.pool
    return EngineSample(
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
    """Return the name under which a group's instances report their step times and predictors find them."""
    return group.step_time if group.speed == 1.0 else f"{group.step_time} at speed {group.speed:g}"


def _step_time(group: Group, step_times: StepTimes) -> LinearStepTime:
    model = step_times(group.step_time)
    return model if group.speed == 1.0 else model.times(1 / group.speed)
