"""A whole cluster in virtual time: ingresses, workers with modelled engines, a tagger, coordinators, clients, and a
supervisor that restarts what died.

The actors are the services' own; only what surrounds them is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from string import ascii_lowercase
from zlib import crc32

import msgspec
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from millrace.actor.actor import Actor
from millrace.actor.config import BusConfig
from millrace.actor.engine import EngineInfo
from millrace.contracts.catalog import Role
from millrace.contracts.kv import KvEndpoint
from millrace.contracts.message import Body
from millrace.contracts.plan import InstanceRole
from millrace.contracts.subjects import Subjects
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import modelled_endpoint
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.steptime import LinearStepTime
from millrace.enginemodel.tokens import OutputLengths, Vocabulary
from millrace.policies.dispatch.loading import load_policy
from millrace.sim.clients import Clients
from millrace.sim.engine_sim import SimulatedEngine, simulated_engines
from millrace.sim.kv_network import SimKvNetwork
from millrace.sim.links import LinkModel
from millrace.sim.oracle import Oracle
from millrace.sim.process import Handlers, SimActor, SimProcess
from millrace.sim.runtime_sim import MILLISECOND, Simulation
from millrace.sim.supervising import WATCH_NS, SimSupervisor
from services.coordinator.actor import ACCEPTS as COORDINATOR_ACCEPTS
from services.coordinator.actor import CoordinatorActor
from services.ingress.actor import ACCEPTS as INGRESS_ACCEPTS
from services.ingress.actor import IngressActor
from services.ingress.config import DispatchConfig, IngressConfig, LimitsConfig
from services.ingress.metrics import IngressMetrics
from services.ingress.tokens.detokenizer import TextModel
from services.ingress.tokens.detokenizer import Vocabulary as TextVocabulary
from services.migrator.actor import ACCEPTS as MIGRATOR_ACCEPTS
from services.migrator.actor import MigratorActor
from services.migrator.config import MigratorConfig
from services.migrator.metrics import MigratorMetrics
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

_EOS = 256  # behind the 256 bytes

#: Builds an actor from its name and incarnation.
Build = Callable[[str, int], Actor]


class MigrationShape(msgspec.Struct, frozen=True, kw_only=True):
    """How running sequences move between the workers of a cluster.

    Attributes:
        verify: Whether checksums travel with the blocks. Without them a wrong read is a wrong token.
        roles: Of workers, by name or pattern.
        bytes_per_s: Of each worker's link, in each direction.
        latency_ns: Before the first byte of each read.
    """

    verify: bool = True
    roles: dict[str, InstanceRole] = {}
    bytes_per_s: float = 12.5e9
    latency_ns: int = 30_000


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    """How large a cluster is and what its engines are like.

    Attributes:
        predictors: Each serves every instance (replicas of each other); 0 for none, which leaves a policy that asks
            them to its fallback.
        restart_ns: A process that ended is started again after a time between these.
        call_timeout_s: Deadline of every call.
        migration: A migrator for each worker, and how KV travels; None for neither.
    """

    ingresses: int = 2
    workers: int = 3
    taggers: int = 1
    predictors: int = 0
    coordinators: int = 2
    engine: EngineParameters = EngineParameters(
        max_model_len=512, block_size=16, blocks_total=80, max_sequences=6, token_budget=96
    )
    step_time: LinearStepTime = LinearStepTime(fixed=8e6, per_decode=3e5, per_prefill_token=3e4)
    lengths: OutputLengths = OutputLengths(mean=40, sigma=0.8, length_max=250)
    policy: str = "join_shortest_queue"
    queue_max: int = 32
    calls_open_max: int = 200
    call_timeout_s: float = 60.0
    restart_ns: tuple[int, int] = (300 * MILLISECOND, 1500 * MILLISECOND)
    migration: MigrationShape | None = None


def byte_vocabulary() -> TextVocabulary:
    """One token per byte, and an end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    assert tokenizer.token_to_id("<eos>") == _EOS
    return TextVocabulary(tokenizer)


def _words(vocabulary: TextVocabulary) -> Vocabulary:
    """What engines say: letters and spaces, so that each token is a character that a client can tell from others."""
    ids = {vocabulary.piece_text(token): token for token in range(_EOS)}
    return Vocabulary(
        size=_EOS + 1, eos_token_id=_EOS, letters=tuple(ids[letter] for letter in ascii_lowercase), spaces=(ids[" "],)
    )


class SimulatedCluster:
    """Composition root.

    Attributes:
        clients: Submit calls here; they judge what comes.
        engines: Engine of each worker's present incarnation.
        network: Carries KV between them; None without migrators.
        supervisor: Starts again what died.
    """

    def __init__(self, seed: int, shape: ClusterShape, *, link: LinkModel | None = None, verify: bool = True) -> None:
        self.simulation = Simulation(seed, verify=verify, link=link)
        self.shape = shape
        self.subjects = Subjects(CLUSTER)
        self.engines: dict[str, SimulatedEngine] = {}
        self.network: SimKvNetwork | None = None
        if shape.migration is not None:
            wire = shape.migration
            self.network = SimKvNetwork(self.simulation, bytes_per_s=wire.bytes_per_s, latency_ns=wire.latency_ns)
        self._text = TextModel(byte_vocabulary(), frozenset({_EOS}))
        self._words = _words(self._text.vocabulary)
        self._oracle = Oracle(self._engine, self._text.vocabulary, self._words)
        self.clients = Clients(self._oracle)
        rng = Random(f"{seed}/supervisor")
        self.supervisor = SimSupervisor(
            self.simulation, self.subjects, restart_after_ns=lambda: rng.randrange(*shape.restart_ns)
        )
        self._roles: dict[Role, list[SimActor]] = {}
        self._build()
        self.simulation.after(WATCH_NS, self._watch)

    @property
    def ingresses(self) -> list[SimActor]:
        return self._roles[Role.INGRESS]

    @property
    def workers(self) -> list[SimActor]:
        return self._roles[Role.WORKER]

    @property
    def migrators(self) -> list[SimActor]:
        """In the order of the workers."""
        return self._roles.get(Role.MIGRATOR, [])

    def of_role(self, role: Role) -> list[SimActor]:
        """Actors of one role."""
        return self._roles[role]

    def nodes(self) -> list[str]:
        """All nodes: each actor has one of its own."""
        return [actor.node.name for actors in self._roles.values() for actor in actors]

    def _build(self) -> None:
        from services.predictor.actor import ACCEPTS as PREDICTOR_ACCEPTS  # brings scipy, which scenarios may not need

        shape, add = self.shape, self._add
        for index in range(shape.coordinators):
            add(Role.COORDINATOR, f"coordinator-{index}", self._coordinator, COORDINATOR_ACCEPTS)
        for index in range(shape.taggers):
            add(Role.TAGGER, f"tagger-{index}", self._tagger, TAGGER_ACCEPTS)
        for index in range(shape.predictors):
            add(Role.PREDICTOR, f"predictor-{index}", self._predictor, PREDICTOR_ACCEPTS)
        for index in range(shape.workers):
            add(Role.WORKER, f"w{index}", self._worker, WORKER_ACCEPTS)
        for index in range(shape.ingresses):
            add(Role.INGRESS, f"ingress-{index}", self._ingress, INGRESS_ACCEPTS)
        for index in range(shape.workers if shape.migration else 0):
            add(Role.MIGRATOR, f"migrator-w{index}", self._migrator, MIGRATOR_ACCEPTS)

    def _add(self, role: Role, name: str, build: Build, accepts: tuple[type[Body], ...]) -> None:
        handlers: Callable[[SimProcess], Handlers] | None = None
        if role is Role.INGRESS:
            handlers = self.clients.handlers
        elif role is Role.WORKER:
            handlers = simulated_engines(self._engine_of, self.engines, self.network)
        actor = self.simulation.add(
            lambda incarnation: build(name, incarnation),
            node=name,
            accepts=accepts,
            handlers=handlers,
        )
        self._roles.setdefault(role, []).append(actor)

    # The services, as their __main__ builds them

    def _coordinator(self, name: str, incarnation: int) -> CoordinatorActor:
        roles = self.shape.migration.roles if self.shape.migration else {}
        return CoordinatorActor(name=name, cluster=CLUSTER, incarnation=incarnation, roles=roles)

    def _migrator(self, name: str, incarnation: int) -> MigratorActor:
        return MigratorActor(
            config=MigratorConfig(
                name=name, instances=[name.removeprefix("migrator-")], bus=BusConfig(cluster=CLUSTER)
            ),
            incarnation=incarnation,
            rng=Random(f"{name}-{incarnation}"),
            metrics=MigratorMetrics(CollectorRegistry()),
        )

    def _tagger(self, name: str, incarnation: int) -> TaggerActor:
        return TaggerActor(name=name, cluster=CLUSTER, incarnation=incarnation)

    def _predictor(self, name: str, incarnation: int) -> Actor:
        from services.predictor.actor import PredictorActor

        return PredictorActor(
            config=PredictorConfig(name=name, bus=BusConfig(cluster=CLUSTER)),
            incarnation=incarnation,
            step_times={MODEL: self.shape.step_time},
            metrics=PredictorMetrics(),
        )

    def _worker(self, name: str, incarnation: int) -> WorkerActor:
        parameters = self.shape.engine
        return WorkerActor(
            identity=Identity(instance=name, incarnation=incarnation, model=MODEL),
            info=EngineInfo(
                engine="modelled",
                engine_version="1",
                model=MODEL,
                max_model_len=parameters.max_model_len,
                max_sequences=parameters.max_sequences,
                token_budget=parameters.token_budget,
                block_size=parameters.block_size,
                blocks_total=parameters.blocks_total,
                step_time=MODEL,
                kv=self._endpoint(name, incarnation),
            ),
            subjects=self.subjects,
            limits=WorkerLimits(queue_max=self.shape.queue_max, drain_limit_ms=1_500),
            rng=Random(f"{name}-{incarnation}"),
        )

    def _ingress(self, name: str, incarnation: int) -> IngressActor:
        config = IngressConfig(
            name=name,
            bus=BusConfig(cluster=CLUSTER),
            limits=LimitsConfig(calls_open_max=self.shape.calls_open_max, call_timeout_s=self.shape.call_timeout_s),
            dispatch=DispatchConfig(policy=self.shape.policy),
        )
        return IngressActor(
            config=config,
            incarnation=incarnation,
            models={MODEL: self._text},
            metrics=IngressMetrics(CollectorRegistry()),
            rng=Random(f"{name}-{incarnation}"),
            policy=load_policy(self.shape.policy),
        )

    def _endpoint(self, name: str, incarnation: int) -> KvEndpoint | None:
        if self.shape.migration is None:
            return None
        return modelled_endpoint(self.shape.engine, key=f"{name}/{incarnation}", model=MODEL)

    def _engine_of(self, process: SimProcess) -> ModelledEngine:
        engine = self._engine(self._endpoint(process.name, process.incarnation))
        engine.moves.leases.verify = self.shape.migration is None or self.shape.migration.verify
        engine.noise = crc32(f"{process.name}/{process.incarnation}".encode())
        self._oracle.noises.append(engine.noise)
        return engine

    def _engine(self, kv: KvEndpoint | None = None) -> ModelledEngine:
        return ModelledEngine(
            self.shape.engine, self.shape.step_time, vocabulary=self._words, lengths=self.shape.lengths, kv=kv
        )

    # The supervisor

    def _watch(self) -> None:
        """Says who died, and starts it again after a while."""
        self.supervisor.look((role, actor) for role, actors in self._roles.items() for actor in actors)
        self.clients.lose_connections()
        self.simulation.after(WATCH_NS, self._watch)
