"""A worker actor on a hand-moved clock, and short words for what is said to it and by it."""

import random
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Publish, Reply
from millrace.actor.engine import EngineStepped, KvDenied, SequenceAdded, StepOutput
from millrace.contracts.ingress import TokensGenerated
from millrace.contracts.kv import CopierKind, KvEndpoint, KvRefusal
from millrace.contracts.leases import KvRefused
from millrace.contracts.local import TimerFired
from millrace.contracts.message import Message
from millrace.contracts.status import BatchComposition, EngineDescription, EngineSnapshot, SequenceState, SequenceStatus
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import Sampling, SubmitSequence

from services.worker.actor import WorkerActor
from services.worker.config import MigrationConfig, WorkerLimits
from services.worker.identity import Identity
from tests.testbed.messages import plain

MS = 1_000_000
START = 1_000_000_000 * 1_000_000_000
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
INFO = EngineDescription(
    engine="modelled",
    engine_version="1",
    model="m",
    max_model_len=100,
    max_sequences=2,
    token_budget=64,
    block_size=16,
    blocks_total=32,
)
KV = KvEndpoint(fingerprint="f", block_tokens=16, block_bytes=1024, blocks=33, copiers=[CopierKind.MODELLED])
#: Of an engine between which and others sequences move.
MOVING = msgspec.structs.replace(INFO, kv=KV)
NO_CHANGES = MigrationConfig()


class Bench:
    """A worker actor on a hand-moved clock. ``say`` sends a body and returns the effects."""

    def __init__(
        self, info: EngineDescription = INFO, migration: MigrationConfig = NO_CHANGES, now: int = START, **limits: int
    ) -> None:
        self.now = now
        self.actor = WorkerActor(
            identity=Identity(instance="w0", incarnation=7, model="m"),
            info=info,
            subjects=Subjects("t"),
            limits=WorkerLimits(**limits),
            rng=random.Random(1),
            migration=migration,
        )
        self.first = self.actor.start(self.now)

    def say(self, body: Any, *, reply_to: str = "", traceparent: str = "", after_ms: float = 0) -> list[Effect]:
        self.now += int(after_ms * MS)
        effects = self.actor.handle(Message(body, reply_to=reply_to, traceparent=traceparent), self.now)
        self.actor.check_invariants()
        return effects

    def submit(self, sequence: str = "r1.0", **fields: Any) -> list[Effect]:
        traceparent = fields.pop("traceparent", "")
        return self.say(submit(sequence, **fields), reply_to="inbox", traceparent=traceparent)

    def running(self, sequence: str = "r1.0", **fields: Any) -> None:
        """Submits a sequence and lets the engine take it."""
        self.submit(sequence, **fields)
        self.say(SequenceAdded(sequence=sequence))

    def step(self, *outputs: StepOutput, after_ms: float = 1, number: int = 1) -> list[Effect]:
        return self.say(
            EngineStepped(step=number, at_ns=self.now + int(after_ms * MS), outputs=list(outputs)), after_ms=after_ms
        )

    def tick(self, times: int = 1) -> list[Effect]:
        effects = []
        for _ in range(times):
            effects += self.say(TimerFired(name="tick"), after_ms=1000)
        return effects


def submit(sequence: str = "r1.0", **fields: Any) -> SubmitSequence:
    defaults: dict[str, Any] = {
        "epoch": 0,
        "ingress": "i0",
        "ingress_incarnation": 5,
        "prompt_token_ids": [1, 2, 3],
        "sampling": Sampling(max_tokens=10),
    }
    return SubmitSequence(sequence=sequence, **{**defaults, **fields})


def out(*tokens: int, sequence: str = "r1.0", **fields: Any) -> StepOutput:
    return StepOutput(sequence=sequence, token_ids=list(tokens), **fields)


def snapshot(at_ns: int, *, step: int = 1, running: int = 0) -> EngineSnapshot:
    entries = [SequenceStatus(f"s{i}.0", SequenceState.RUNNING, 10, 12, 3, 20, 1, at_ns) for i in range(running)]
    blocks = {"blocks_free": 32 - running, "blocks_total": 32}
    batch = BatchComposition(decodes=running)
    return plain(
        EngineSnapshot, step=step, at_ns=at_ns, running=entries, batch=batch, step_duration_ns=2 * MS, **blocks
    )


def only(effects: list[Effect], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def bodies(effects: list[Effect], kind: Any) -> list[Any]:
    return [e.body for e in effects if isinstance(e, Publish | Reply) and isinstance(e.body, kind)]


def chunks(effects: list[Effect]) -> list[Any]:
    return [chunk for body in bodies(effects, TokensGenerated) for chunk in body.chunks]


def denied(reason: KvRefusal, migration: str = "m1") -> KvDenied:
    return KvDenied(migration=migration, reason=reason, detail="so it is")


def refusal(effects: list[Effect]) -> KvRefusal:
    """The reason for which the only question was refused."""
    (body,) = bodies(effects, KvRefused)
    return body.reason
