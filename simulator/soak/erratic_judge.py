"""A judge that answers well, late, with nothing, with nonsense, or not at all."""

from __future__ import annotations

import math
from random import Random

import msgspec
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, Reply, StartTimer, Stop, Subscribe
from millrace.contracts.catalog import Role
from millrace.contracts.judge import AnswerJudged, JudgeAnswer
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.contracts.subjects import Subjects
from millrace.sim.runtime_sim import MILLISECOND
from millrace.sim.stand_in import StandIn

from simulator.cluster import CLUSTER

ACCEPTS: tuple[type[Body], ...] = (JudgeAnswer,)

#: Longest time that it thinks; some of it is past every asker's deadline.
THINKS_MS_MAX = 3_000


class ErraticConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Name of the judge and of the cascade that it judges."""

    name: str
    cascade: str


class ErraticJudge(StandIn):
    """Answers at random. It forgets the oldest questions beyond a thousand."""

    def __init__(self, config: ErraticConfig, rng: Random) -> None:
        self.name = config.name
        self._cascade = config.cascade
        self._rng = rng
        self._later: dict[str, tuple[str, Body]] = {}
        self._count = 0

    def start(self, now_ns: int) -> list[Effect]:
        return [Subscribe(subject=Subjects(CLUSTER).judge(self._cascade), queue_group=Role.JUDGE.value)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case JudgeAnswer() as asked:
                return self._answer(asked, message.reply_to, now_ns)
            case TimerFired(name=name) if name in self._later:
                to, body = self._later.pop(name)
                return [Reply(to=to, body=body)]
            case StopRequested():
                return [Stop(reason="asked to stop")]
        return []

    def _answer(self, asked: JudgeAnswer, reply_to: str, now_ns: int) -> list[Effect]:
        rng = self._rng
        score = rng.choice((rng.uniform(0.0, 100.0),) * 6 + (None, math.nan, 250.0))
        body: Body = AnswerJudged(request=asked.request, score=score, kind="llm")
        if rng.random() < 0.05:
            body = ErrorReply(reason="broken", detail="")
        fate = rng.random()
        if fate < 0.1 or not reply_to:
            return []
        if fate < 0.6:
            return [Reply(to=reply_to, body=body)]
        self._count += 1
        name = f"answer.{self._count}"
        self._later[name] = (reply_to, body)
        if len(self._later) > 1_000:
            self._later.pop(next(iter(self._later)))
        return [StartTimer(name=name, at_ns=now_ns + rng.randrange(THINKS_MS_MAX) * MILLISECOND)]


def build(config: ErraticConfig, deps: ActorDeps) -> Actor:
    """The actor of a configuration."""
    return ErraticJudge(config, deps.rng)
