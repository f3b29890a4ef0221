"""A commit that is under way until its source has gone on, between workers and migrators as they are, without
checksums: the target must not decode from what has become of the source's blocks.
"""

import random

import msgspec
from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Reply, Subscribe
from millrace.actor.engine import EngineInfo
from millrace.contracts.broker import MoveReason
from millrace.contracts.ingress import TokensGenerated
from millrace.contracts.leases import KvPulled, MigrationPrepared, SequenceFrozen
from millrace.contracts.local import Replied
from millrace.contracts.message import Message
from millrace.contracts.migration import AllotEpoch, EpochAllotted, MoveSequence, SequenceMoved
from millrace.contracts.scheduler import scheduler_fields
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import Sampling, SubmitSequence
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import modelled_endpoint
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.tokens import OutputLengths, Vocabulary
from millrace.sim.checkers import Checker
from millrace.sim.engine_sim import SimulatedEngine
from millrace.sim.kv_network import SimKvNetwork
from millrace.sim.links import LinkModel
from millrace.sim.process import Handlers, SimActor, SimProcess
from millrace.sim.runtime_sim import MILLISECOND, Simulation
from millrace.sim.stand_in import StandIn

from services.migrator.actor import ACCEPTS as MIGRATOR_ACCEPTS
from services.migrator.actor import MigratorActor
from services.migrator.config import MigratorConfig
from services.migrator.metrics import MigratorMetrics
from services.worker.actor import ACCEPTS as WORKER_ACCEPTS
from services.worker.actor import WorkerActor
from services.worker.config import WorkerLimits
from services.worker.status_messages import Identity
from tests.testbed.messages import plain
from tests.testbed.modelled_tokens import tokens_after
from tests.unit.moving_rig import STEP_TIME

PARAMETERS = EngineParameters(max_model_len=256, block_size=16, blocks_total=48, max_sequences=5, token_budget=64)
SUBJECTS = Subjects("t")
PROMPT = [97 + index % 26 for index in range(100)]


class WithoutClock(WorkerActor):
    """A worker whose answers do not tell its clock: deadlines are told to it as remaining milliseconds only."""

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        effects = super().handle(message, now_ns)
        return [
            msgspec.structs.replace(effect, body=msgspec.structs.replace(effect.body, at_ns=0))
            if isinstance(effect, Reply) and isinstance(effect.body, MigrationPrepared | KvPulled)
            else effect
            for effect in effects
        ]


class Ingress(StandIn):
    """Allots epochs and keeps the token log of ``s.0``.

    Attributes:
        log: As it came, each epoch's tokens behind those that were there when it began.
        moved_at: Length of the log when the target said that it has the sequence, and what it had brought.
    """

    name = "i0"

    def __init__(self) -> None:
        self.log: list[int] = []
        self.moved_at: tuple[int, int] | None = None

    def start(self, now_ns: int) -> list[Effect]:
        subjects = (SUBJECTS.tokens("i0"), SUBJECTS.moved("i0"), SUBJECTS.epoch("i0"), SUBJECTS.returned("i0"))
        return [Subscribe(subject=subject) for subject in subjects]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case AllotEpoch() as body:
                allotted = EpochAllotted(migration=body.migration, sequence=body.sequence, epoch=body.epoch + 1)
                return [Reply(to=message.reply_to, body=allotted)]
            case SequenceMoved() as body:
                self.moved_at = self.moved_at or (len(self.log), body.first_index)
            case TokensGenerated() as body:
                for chunk in body.chunks:
                    if chunk.sequence == "s.0":
                        assert chunk.first_index == len(self.log)
                        self.log += chunk.token_ids
        return []


class Delay(Checker):
    """Delay of the commit once the source stands still, and loss of what the source says from then on."""

    def __init__(self, source: SimActor, target: SimActor) -> None:
        self._source, self._target = source, target
        self.frozen: SequenceFrozen | None = None

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        if isinstance(message.body, Replied) and isinstance(message.body.body, SequenceFrozen):
            self.frozen = message.body.body
            self._target.node.down.change(LinkModel(delay_ns=700 * MILLISECOND))
            self._source.node.up.change(LinkModel(loss=1.0))


class World:
    """Two instances with their migrators."""

    def __init__(self, target: type[WorkerActor]) -> None:
        self.simulation = Simulation(1)
        self.network = SimKvNetwork(self.simulation)
        self.engines: dict[str, SimulatedEngine] = {}
        self.ingress = Ingress()
        self.simulation.add(lambda _: self.ingress, node="i0", accepts=(AllotEpoch, SequenceMoved, TokensGenerated))
        a, b = self._worker("a", WorkerActor), self._worker("b", target)
        self._migrator("a")
        self.delay = Delay(a, b)
        self.simulation.check_with(self.delay)

    def _worker(self, name: str, kind: type[WorkerActor]) -> SimActor:
        kv = modelled_endpoint(PARAMETERS, key=name, model="m")
        info = EngineInfo(engine="modelled", engine_version="1", model="m", kv=kv, **scheduler_fields(PARAMETERS))

        def engine(_: SimProcess) -> ModelledEngine:
            lengths = OutputLengths(mean=10_000, sigma=0)
            built = ModelledEngine(PARAMETERS, STEP_TIME, vocabulary=Vocabulary(), lengths=lengths, kv=kv)
            built.moves.leases.verify = False
            return built

        def worker(incarnation: int) -> WorkerActor:
            return kind(
                identity=Identity(instance=name, incarnation=incarnation, model="m"),
                info=info,
                subjects=SUBJECTS,
                limits=WorkerLimits(ingress_silence_ms=10**9),
                rng=random.Random(name),
            )

        def handlers(process: SimProcess) -> Handlers:
            self.engines[process.name] = SimulatedEngine(process, engine(process), network=self.network)
            return self.engines[process.name].handlers()

        return self.simulation.add(worker, node=name, accepts=WORKER_ACCEPTS, handlers=handlers)

    def _migrator(self, instance: str) -> SimActor:
        name = f"migrator-{instance}"
        config = MigratorConfig(name=name, instances=[instance], bus=BusConfig(cluster="t"))

        def migrator(incarnation: int) -> MigratorActor:
            return MigratorActor(
                config=config, incarnation=incarnation, rng=random.Random(name), metrics=MigratorMetrics()
            )

        return self.simulation.add(migrator, node=name, accepts=MIGRATOR_ACCEPTS)

    def submit(self, sequence: str, prompt: list[int], max_tokens: int) -> None:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        body = plain(SubmitSequence, sequence=sequence, prompt_token_ids=prompt, sampling=sampling)
        self.simulation.publish(SUBJECTS.engine("a", "submit"), body)

    def run(self, ms: int) -> None:
        self.simulation.run_for(ms * MILLISECOND)


def late_commit(target: type[WorkerActor]) -> World:
    """The source thaws, decodes the sequence to its end unheard, and others take its blocks; then the commit comes."""
    world = World(target)
    world.run(10)
    world.submit("s.0", PROMPT, 150)
    world.run(40)
    world.simulation.publish(
        SUBJECTS.migrate("a", "move"), MoveSequence(sequence="s.0", target="b", reason=MoveReason.ORDER)
    )
    world.run(450)
    for index in range(6):
        world.submit(f"o{index}.0", [98 + index] * 200, 10)
    world.run(2_000)
    brought = len(world.delay.frozen.output_token_ids)
    assert world.ingress.moved_at == (brought, brought), "so a real ingress lets the target have it"
    return world


def right_tokens() -> list[int]:
    return tokens_after(PROMPT, 150, table=Vocabulary().table())


def test_a_commit_that_comes_after_its_source_went_on_reads_nothing_that_is_decoded_from() -> None:
    world = late_commit(WorkerActor)
    assert world.ingress.log == right_tokens()
    assert not world.network.violations
    assert not world.engines["b"].engine.moves.arrivals.poisoned


def test_without_the_targets_clock_such_a_commit_gives_wrong_tokens() -> None:
    """Show the need for the deadline by the target's clock: with milliseconds alone the read seems to be in time."""
    world = late_commit(WithoutClock)
    assert world.engines["b"].engine.moves.arrivals.poisoned == ["s.0"]
    assert world.ingress.log != right_tokens()
