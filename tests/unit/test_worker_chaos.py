"""Workers and modelled engines under a migrator that does everything in the wrong order, over links that lose, repeat
and reorder: no wrong token, no lease or reservation that stays, no block lost.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Effect, Publish, Request, StartTimer, Subscribe
from millrace.actor.engine import EngineInfo
from millrace.contracts.ingress import TokensGenerated
from millrace.contracts.kv import KvEndpoint, KvHandover
from millrace.contracts.leases import (
    EndLease,
    FreezeSequence,
    KvLeased,
    LeaseKv,
    PrepareMigration,
    PullKv,
    SequenceFrozen,
    UnreserveKv,
)
from millrace.contracts.local import Replied, TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import SequenceMoved
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import CancelSequence, Sampling, SequenceAccepted, SubmitSequence
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import modelled_endpoint
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.tokens import OutputLengths, Vocabulary, tokens_after
from millrace.sim.engine_sim import SimulatedEngine, simulated_engines
from millrace.sim.kv_network import KvFaults, SimKvNetwork
from millrace.sim.links import LinkModel
from millrace.sim.runtime_sim import MILLISECOND, Simulation

from services.worker.actor import ACCEPTS, WorkerActor
from services.worker.config import MigrationConfig, WorkerLimits
from services.worker.status_messages import Identity
from tests.unit.moving_rig import STEP_TIME

PARAMETERS = EngineParameters(max_model_len=256, block_size=16, blocks_total=48, max_sequences=5, token_budget=64)
SUBJECTS = Subjects("t")
WORKERS = ("w0", "w1", "w2")
LINKS = {"sound": LinkModel(), "faulty": LinkModel(jitter_ns=300_000, loss=0.05, duplicate=0.1, reorder=0.1)}
ACTIONS, EVERY_NS = 500, 3 * MILLISECOND


class Migration:
    """Migrator's knowledge of one migration."""

    def __init__(self, name: str, given: SubmitSequence, source: str, target: str) -> None:
        self.name, self.given, self.source, self.target = name, given, source, target
        self.leased: KvLeased | None = None
        self.frozen: SequenceFrozen | None = None
        self.step = 0


class Madman:
    """Ingress and both migrators in one. Says whatever it likes; notes every token that comes."""

    name = "mad"

    def __init__(self, seed: int, endpoints: dict[str, KvEndpoint]) -> None:
        self.rng = random.Random(f"mad/{seed}")
        self.endpoints = endpoints
        self.homes: dict[str, str] = {}
        self.given: dict[str, SubmitSequence] = {}
        self.epochs: dict[str, int] = {}
        self.migrations: list[Migration] = []
        self.asked: dict[str, Migration] = {}
        self.actions = 0
        self.moved = 0
        self.ended = 0
        self.wrong: list[str] = []

    def start(self, now_ns: int) -> list[Effect]:
        subjects = (SUBJECTS.tokens("i0"), SUBJECTS.moved("i0"), SUBJECTS.returned("i0"))
        return [*(Subscribe(subject=subject) for subject in subjects), StartTimer(name="act", at_ns=now_ns + EVERY_NS)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case TimerFired():
                return self._act(now_ns)
            case TokensGenerated() as body:
                for chunk in body.chunks:
                    self._check(chunk.sequence, chunk.first_index, chunk.token_ids)
            case SequenceMoved():
                self.moved += 1
            case Replied(correlation=correlation, body=body):
                self._learn(self.asked.pop(correlation, None), body)
        return []

    def _check(self, sequence: str, first: int, token_ids: list[int]) -> None:
        given = self.given[sequence]
        right = tokens_after(given.prompt_token_ids, first + len(token_ids), table=Vocabulary().table())[first:]
        if right != token_ids:
            self.wrong.append(f"{sequence} from {first}")

    def _learn(self, migration: Migration | None, body: Any) -> None:
        if migration is None:
            return
        if isinstance(body, KvLeased) and (migration.leased is None or body.from_block > 0):
            migration.leased = body
        elif isinstance(body, SequenceFrozen):
            migration.frozen = body
            self._check(body.sequence, 0, body.output_token_ids)
        elif isinstance(body, SequenceAccepted):
            self.homes[body.sequence] = migration.target

    # What it does

    def _act(self, now_ns: int) -> list[Effect]:
        if self.actions >= ACTIONS:
            return []
        self.actions += 1
        effects: list[Effect] = [StartTimer(name="act", at_ns=now_ns + self.rng.randrange(EVERY_NS))]
        if not self.migrations or self.rng.random() < 0.06:
            return effects + self._submit()
        if self.rng.random() < 0.08:
            self._begin()
        if self.rng.random() < 0.02:
            name = self.rng.choice(list(self.given))
            body = CancelSequence(sequence=name, epoch=self.epochs[name])
            effects.append(Publish(subject=SUBJECTS.engine(self.homes[name], "cancel"), body=body))
        migration = self.rng.choice(self.migrations[-3:])
        return effects + self._ask(migration)

    def _submit(self) -> list[Effect]:
        name = f"s{len(self.given)}.0"
        given = SubmitSequence(
            sequence=name,
            epoch=0,
            ingress="i0",
            ingress_incarnation=1,
            prompt_token_ids=[self.rng.randrange(97, 123) for _ in range(self.rng.randrange(4, 90))],
            sampling=Sampling(max_tokens=self.rng.randrange(40, 160), temperature=0.0),
        )
        home = self.rng.choice(WORKERS)
        self.given[name], self.homes[name], self.epochs[name] = given, home, 0
        self._begin()
        return [Publish(subject=SUBJECTS.engine(home, "submit"), body=given)]

    def _begin(self) -> None:
        name = self.rng.choice(list(self.given)[-5:])
        source = self.homes[name]
        target = self.rng.choice([worker for worker in WORKERS if worker != source])
        given = msgspec.structs.replace(self.given[name], epoch=self.epochs[name])
        self.migrations.append(Migration(f"m{len(self.migrations)}", given, source, target))

    def _ask(self, migration: Migration) -> list[Effect]:
        """The next step as often as not; otherwise any."""
        steps = [self._lease, self._reserve, self._pull, self._freeze, self._come, self._end, self._give_up]
        order = self.rng.random() < 0.8
        built = steps[migration.step](migration) if order else self.rng.choice(steps)(migration)
        if order and built is not None:
            migration.step = min(migration.step + 1, 5)
        if built is None:
            return []
        place, verb, body = built
        correlation = f"q{self.actions}"
        self.asked[correlation] = migration
        request = Request(
            subject=SUBJECTS.engine(place, verb), body=body, correlation=correlation, timeout_ns=500 * MILLISECOND
        )
        return [request]

    def _lease(self, migration: Migration) -> tuple[str, str, Body]:
        position = len(migration.leased.blocks) if migration.leased and self.rng.random() < 0.5 else 0
        given = migration.given
        body = LeaseKv(
            migration=migration.name,
            sequence=given.sequence,
            epoch=given.epoch,
            from_block=position,
            lease_ms=self.rng.choice((5, 100, 500)),
        )
        return migration.source, "lease", body

    def _reserve(self, migration: Migration) -> tuple[str, str, Body]:
        tokens = migration.given.prompt_token_ids + (migration.frozen.output_token_ids if migration.frozen else [])
        body = PrepareMigration(
            migration=migration.name,
            sequence=migration.given.sequence,
            epoch=migration.given.epoch + 1,
            endpoint=self.endpoints[migration.source],
            token_ids=tokens,
            blocks=-(-len(tokens) // 16) + self.rng.randrange(4),
            reserve_ms=self.rng.choice((5, 100, 500)),
            pull=migration.leased.blocks if migration.leased and not migration.leased.from_block else [],
            checksums=migration.leased.checksums if migration.leased and not migration.leased.from_block else [],
            read_ms=self.rng.choice((2, 20, 200)),
        )
        return migration.target, "prepare", body

    def _pull(self, migration: Migration) -> tuple[str, str, Body] | None:
        leased = migration.leased
        if leased is None:
            return None
        body = PullKv(
            migration=migration.name,
            from_block=leased.from_block,
            blocks=leased.blocks,
            checksums=leased.checksums,
            read_ms=self.rng.choice((2, 20, 200)),
        )
        return migration.target, "pull", body

    def _freeze(self, migration: Migration) -> tuple[str, str, Body]:
        body = FreezeSequence(
            migration=migration.name,
            sequence=migration.given.sequence,
            epoch=migration.given.epoch,
            from_block=len(migration.leased.blocks) if migration.leased and self.rng.random() < 0.7 else 0,
            freeze_ms=self.rng.choice((1, 40, 200)),
            new_blocks_max=self.rng.choice((None, None, None, 1)),
            lease_ms=self.rng.choice((5, 100, 500)),
        )
        return migration.source, "freeze", body

    def _come(self, migration: Migration) -> tuple[str, str, Body] | None:
        frozen, given = migration.frozen, migration.given
        if frozen is None:
            return None
        handover = KvHandover(
            migration=migration.name,
            endpoint=self.endpoints[migration.source],
            from_block=frozen.from_block,
            blocks=frozen.blocks,
            computed_tokens=frozen.computed_tokens,
            read_ms=self.rng.choice((1, 20, 200)),
            checksums=frozen.checksums,
        )
        epoch = given.epoch + 1
        self.epochs[given.sequence] = max(epoch, self.epochs[given.sequence])
        body = msgspec.structs.replace(given, epoch=epoch, output_token_ids=frozen.output_token_ids, handover=handover)
        return migration.target, "submit", body

    def _end(self, migration: Migration) -> tuple[str, str, Body]:
        given = migration.given
        body = EndLease(
            migration=migration.name,
            sequence=given.sequence,
            epoch=given.epoch,
            moved=self.homes[given.sequence] == migration.target,
        )
        return migration.source, "end", body

    def _give_up(self, migration: Migration) -> tuple[str, str, Body]:
        return migration.target, "unreserve", UnreserveKv(migration=migration.name)

    def snapshot(self) -> dict[str, Any]:
        return {}

    def check_invariants(self) -> None:
        assert not self.wrong, self.wrong


class Asylum:
    """Three workers and the madman on virtual time."""

    def __init__(self, seed: int, link: LinkModel) -> None:
        self.simulation = Simulation(seed, link=link)
        self.network = SimKvNetwork(self.simulation, bytes_per_s=2e9)
        self.network.faults = KvFaults(stall=0.03, torn=0.1, failed=0.1, late=0.05, late_ns=(1_000_000, 50_000_000))
        self.endpoints = {name: modelled_endpoint(PARAMETERS, key=name, model="m") for name in WORKERS}
        self.engines: dict[str, SimulatedEngine] = {}
        self.workers = [self._add(name) for name in WORKERS]
        self.mad = Madman(seed, self.endpoints)
        accepts = (TokensGenerated, SequenceMoved)
        self.simulation.add(lambda _: self.mad, node="mad", accepts=accepts)

    def _add(self, name: str) -> Any:
        handlers = simulated_engines(lambda process: self._engine(process.name), self.engines, self.network)
        return self.simulation.add(
            lambda incarnation: self._worker(name, incarnation), node=name, accepts=ACCEPTS, handlers=handlers
        )

    def _engine(self, name: str) -> ModelledEngine:
        lengths = OutputLengths(mean=10_000, sigma=0)
        return ModelledEngine(PARAMETERS, STEP_TIME, vocabulary=Vocabulary(), lengths=lengths, kv=self.endpoints[name])

    def _worker(self, name: str, incarnation: int) -> WorkerActor:
        info = EngineInfo(
            engine="modelled",
            engine_version="1",
            model="m",
            max_model_len=PARAMETERS.max_model_len,
            max_sequences=PARAMETERS.max_sequences,
            token_budget=PARAMETERS.token_budget,
            block_size=PARAMETERS.block_size,
            blocks_total=PARAMETERS.blocks_total,
            kv=self.endpoints[name],
        )
        return WorkerActor(
            identity=Identity(instance=name, incarnation=incarnation, model="m"),
            info=info,
            subjects=SUBJECTS,
            limits=WorkerLimits(ingress_silence_ms=10**9, token_interval_ms=7),
            rng=random.Random(name),
            migration=MigrationConfig(lease_ms_max=400, freeze_ms_max=100, reserve_ms_max=400),
        )

    def figures(self, name: str) -> int:
        return sum(getattr(worker.actor.figures, name) for worker in self.workers)


@pytest.mark.parametrize("link", list(LINKS))
@pytest.mark.parametrize("seed", range(5))
def test_whatever_a_migrator_says_nothing_is_wrong_or_stays_behind(seed: int, link: str) -> None:
    asylum = Asylum(seed, LINKS[link])
    for _ in range(200):
        asylum.simulation.run_for(10 * MILLISECOND)
        for engine in asylum.engines.values():
            engine.engine.check_invariants()
    assert asylum.mad.actions == ACTIONS
    asylum.simulation.run_for(5_000 * MILLISECOND)
    assert not asylum.mad.wrong
    assert not asylum.network.violations
    for worker in asylum.workers:
        state = worker.actor.snapshot()
        assert (state["leases"], state["reservations"], state["live"]) == ({}, {}, 0)
    for engine in asylum.engines.values():
        assert not engine.engine.moves.arrivals.poisoned
        account = engine.engine.kv_accounting()
        assert (account.free, account.held, account.reserved) == (PARAMETERS.blocks_total, 0, 0)
    assert asylum.figures("leases") > 10
    assert asylum.figures("freezes") > 2
    assert asylum.figures("reservations") > 10
    assert asylum.figures("arrived") > 0
