"""A small world around one ingress: workers that decode, migrators that move sequences, a bus that is no good.

Tokens depend on everything before them and on who decodes in which epoch, as if they were sampled without a seed: a log
that was spliced from two histories is therefore seen at once. Messages are lost, repeated and delivered in any order;
workers die and come back; frozen sequences thaw whenever they like; migrators stop half-way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from zlib import crc32

from millrace.actor.effects import Effect, Publish, Reply, Request, StartTimer
from millrace.contracts.ingress import FinishReason, TokenChunk, TokensGenerated, TokensResent
from millrace.contracts.local import Replied, RequestFailed, RequestFailure, TimerFired
from millrace.contracts.message import Body, ErrorReply
from millrace.contracts.migration import AllotEpoch, EpochAllotted, SequenceMoved
from millrace.contracts.observers import RequestFinished
from millrace.contracts.worker import (
    AcknowledgeSequences,
    CancelSequence,
    RefusalReason,
    ResendTokens,
    Sampling,
    SequenceAccepted,
    SequenceRefused,
    SubmitSequence,
)

from services.ingress.calls.messages import AcceptCall, CallAbandoned, CompleteCall, DeliverDeltas, FailCall, RefuseCall
from services.ingress.sequence import OpenSequence
from tests.unit.ingress_core import EOS, MILLISECOND, Bench, instance_of

SEQUENCE = "r.0"
TOKENS_MAX = 60


@dataclass
class Profile:
    """Fault rates of the bus, shares of 0 to 1."""

    loss: float
    word_loss: float  # of SequenceMoved
    repeat: float
    death: float
    brought: int  # tokens of what it brought that a target can resend, at most
    stream: bool = True
    stop: tuple[str, ...] = ()


@dataclass
class Held:
    """The sequence at one worker, in one epoch.

    Attributes:
        reading: The migration whose last blocks are still read from the source; it does not decode until then.
        torn: Those blocks were freed under it by a cancel.
    """

    epoch: int
    history: list[int]
    base: int
    sent: int
    frozen: str = ""
    reading: str = ""
    torn: bool = False
    finish: FinishReason | None = None


@dataclass
class Worker:
    name: str
    incarnation: int = 1
    up: bool = True
    held: Held | None = None
    fence: int = -1


@dataclass
class Move:
    """A migration as its source's migrator sees it."""

    id: str
    source: Worker
    target: Worker
    source_incarnation: int
    target_incarnation: int
    epoch: int
    allotted: int = 0
    state: str = "asking"


@dataclass
class World:
    """``run`` until the call has ended, first badly, then healed."""

    rng: Random
    profile: Profile
    bench: Bench = field(init=False)
    flying: list[Callable[[], None]] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    decoded: dict[tuple[str, int, int], Held] = field(default_factory=dict)
    epochs: dict[int, str] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    accepted: int = 0
    shown: str = ""
    told: int = 0  # tokens
    finished: list[RequestFinished] = field(default_factory=list)
    healed: bool = False

    def __post_init__(self) -> None:
        self.bench = Bench(instances=3)
        self.workers = {name: Worker(name) for name in self.bench.incarnations}
        given = {"stream": self.profile.stream, "stop": [*self.profile.stop]}
        out = self.bench.call(sampling=Sampling(max_tokens=TOKENS_MAX), **given)
        self.sequence: OpenSequence = self.bench.actor.state.sequences[SEQUENCE]
        self._route(out)

    # The bus.

    def _fly(self, arrive: Callable[[], None], lost: Callable[[], None] | None = None) -> None:
        """A message is under way; where it is lost, whoever asked notices some time."""
        profile = self.profile
        if not self.healed and self.rng.random() < profile.loss:
            if lost is not None:
                self.flying.append(lost)
            return
        self.flying.append(arrive)
        if not self.healed and self.rng.random() < profile.repeat:
            self.flying.append(arrive)

    def _send(self, body: Body, reply_to: str = "", origin: tuple[str, int] = ("", 0)) -> None:
        """Ingress handles a message; its log stays one history, whatever that was."""
        known = len(self.sequence.log)
        self._route(self.bench.send(body, reply_to))
        log = self.sequence.log
        if len(log) > known:
            chunk = body.chunks[0] if isinstance(body, TokensGenerated) else body.body.chunk  # type: ignore[attr-defined]
            held = self.decoded[(origin[0], origin[1], chunk.epoch)]
            assert log == held.history[: len(log)], f"epoch {chunk.epoch} of {origin[0]} does not continue the log"
            assert not held.torn, f"epoch {chunk.epoch} of {origin[0]} decodes from blocks that were freed under it"

    def _route(self, effects: list[Effect]) -> None:
        self.bench.effects[:] = [e for e in self.bench.effects if isinstance(e, StartTimer)][-40:]
        for effect in effects:
            match effect:
                case Request(body=SubmitSequence()):
                    self._own(effect.body.epoch, instance_of(effect))
                    self._ask(effect, self._submitted)
                case Request(body=ResendTokens()):
                    self._ask(effect, self._resent)
                case Publish(body=CancelSequence() as body):
                    self._tell(effect, lambda worker, body=body: self._cancelled(worker, body.epoch))
                case Publish(body=AcknowledgeSequences() as body):
                    self._tell(effect, lambda worker, body=body: self._acknowledged(worker, body))
                case Publish(body=RequestFinished() as body):
                    self.finished.append(body)
                case Reply(body=EpochAllotted() as body):
                    self._fly(lambda body=body: self._allotted(body))
                case AcceptCall():
                    self.accepted += 1
                case DeliverDeltas():
                    self.shown += "".join(delta.text for delta in effect.deltas)
                    self.told += sum(delta.tokens for delta in effect.deltas)
                case CompleteCall() | FailCall() | RefuseCall():
                    self.ends.append(type(effect).__name__)

    def _own(self, epoch: int, instance: str) -> None:
        assert self.epochs.setdefault(epoch, instance) == instance, f"two owners in epoch {epoch}"

    def _ask(self, request: Request, answer: Callable[[Worker, Any], Body]) -> None:
        worker, incarnation = self.workers[instance_of(request)], self.workers[instance_of(request)].incarnation
        correlation = request.correlation

        def give_up() -> None:
            self._send(RequestFailed(correlation=correlation, reason=RequestFailure.TIMEOUT))

        def arrive() -> None:
            if not worker.up or worker.incarnation != incarnation:
                self.flying.append(give_up)
                return
            body, now = answer(worker, request.body), worker.incarnation
            self._fly(lambda: self._answer(correlation, body, (worker.name, now)), give_up)

        self._fly(arrive, give_up)

    def _answer(self, correlation: str, body: Body, origin: tuple[str, int]) -> None:
        if correlation in self.bench.actor.state.pending:  # a runtime drops late and repeated answers
            self._send(Replied(correlation=correlation, body=body), origin=origin)

    def _tell(self, effect: Publish, take: Callable[[Worker], None]) -> None:
        worker = self.workers[effect.subject.split(".")[-2]]
        self._fly(lambda: take(worker) if worker.up else None)

    # Workers.

    def _submitted(self, worker: Worker, body: SubmitSequence) -> Body:
        held = worker.held
        if held is not None and held.epoch == body.epoch:
            return SequenceAccepted(sequence=SEQUENCE, epoch=body.epoch)
        if body.epoch <= worker.fence:
            return SequenceRefused(sequence=SEQUENCE, epoch=body.epoch, reason=RefusalReason.STALE_EPOCH)
        n = len(body.output_token_ids)
        self._hold(worker, Held(body.epoch, list(body.output_token_ids), n, n))
        return SequenceAccepted(sequence=SEQUENCE, epoch=body.epoch)

    def _hold(self, worker: Worker, held: Held) -> None:
        worker.held = held
        worker.fence = max(worker.fence, held.epoch)
        self.decoded[(worker.name, worker.incarnation, held.epoch)] = held

    def _resent(self, worker: Worker, body: ResendTokens) -> Body:
        held = worker.held
        if held is None or held.epoch != body.epoch:
            return ErrorReply(reason="forgotten")
        return TokensResent(chunk=self._chunk(held, min(max(body.from_index, held.base), len(held.history))))

    def _chunk(self, held: Held, start: int) -> TokenChunk:
        tokens = held.history[start:]
        return TokenChunk(sequence=SEQUENCE, epoch=held.epoch, first_index=start, token_ids=tokens, finish=held.finish)

    def _cancelled(self, worker: Worker, epoch: int) -> None:
        worker.fence = max(worker.fence, epoch)
        held = worker.held
        if held is None or held.epoch > epoch:
            return
        for other in self.workers.values():
            if held.frozen and other.held is not None and other.held.reading == held.frozen:
                other.held.torn = True
        worker.held = None

    def _acknowledged(self, worker: Worker, body: AcknowledgeSequences) -> None:
        held = worker.held
        if held is not None and held.finish is not None and any(e >= held.epoch for _, e in body.sequences):
            worker.held = None

    def _decode(self, worker: Worker) -> None:
        """One step, or the reminder of an end."""
        held = worker.held
        if held is None or held.frozen or held.reading or not worker.up:
            return
        if held.finish is None:
            seed = repr((held.history, held.epoch, worker.name, worker.incarnation)).encode()
            held.history.append(EOS if crc32(seed) % 211 == 0 else crc32(seed) % 26)
            if held.history[-1] == EOS:
                held.finish = FinishReason.STOP
            elif len(held.history) >= TOKENS_MAX:
                held.finish = FinishReason.LENGTH
        start = held.sent if held.sent < len(held.history) else len(held.history)
        chunk, origin = self._chunk(held, start), (worker.name, worker.incarnation)
        held.sent = len(held.history)
        said = TokensGenerated(instance=worker.name, incarnation=worker.incarnation, step=1, chunks=[chunk])
        self._fly(lambda: self._send(said, origin=origin))

    def _die(self, worker: Worker) -> None:
        worker.up, worker.held = False, None
        incarnation = worker.incarnation
        self._fly(lambda: self._route(self.bench.die(worker.name, incarnation)))

    def _come_back(self, worker: Worker) -> None:
        worker.up, worker.fence = True, -1
        worker.incarnation += 1
        self.bench.incarnations[worker.name] = worker.incarnation

    # Migrators.

    def _start_move(self) -> None:
        source = self.rng.choice([*self.workers.values()])
        target = self.rng.choice([w for w in self.workers.values() if w is not source])
        if source.held is None or source.held.finish is not None or source.held.frozen or not target.up:
            return
        if self.sequence.grant is not None and self.rng.random() < 0.8:
            return  # most wait for the one before
        move = Move(f"m{len(self.moves)}", source, target, source.incarnation, target.incarnation, source.held.epoch)
        self.moves.append(move)
        asked = AllotEpoch(
            migration=move.id,
            sequence=SEQUENCE,
            epoch=move.epoch,
            source=source.name,
            target=target.name,
            incarnation=target.incarnation,
        )
        self._fly(lambda: self._send(asked, reply_to=move.id))

    def _allotted(self, body: EpochAllotted) -> None:
        move = next(m for m in self.moves if m.id == body.migration)
        if move.state == "asking":
            self._own(body.epoch, move.target.name)
            move.allotted, move.state = body.epoch, "allotted"

    def _advance(self, move: Move) -> None:
        held = move.source.held
        here = move.source.incarnation == move.source_incarnation and held is not None and held.epoch == move.epoch
        if move.state != "allotted" or held is None or not here or held.frozen or held.finish is not None:
            return
        held.frozen, move.state = move.id, "frozen"
        history = list(held.history)
        self._fly(lambda: self._commit(move, history))

    def _commit(self, move: Move, history: list[int]) -> None:
        target, n = move.target, len(history)
        if not target.up or target.incarnation != move.target_incarnation or move.allotted <= target.fence:
            return
        base = max(0, n - self.profile.brought)
        held = Held(move.allotted, list(history), base, n, reading=move.id)
        self._hold(target, held)
        self.flying.append(lambda: self._added(move, held))

    def _added(self, move: Move, held: Held) -> None:
        """The target has read the last blocks, or knows that it has to recompute them."""
        target = move.target
        if not held.reading or target.held is not held:
            return
        held.reading = ""
        word = SequenceMoved(
            migration=move.id,
            sequence=SEQUENCE,
            epoch=move.allotted,
            instance=target.name,
            incarnation=target.incarnation,
            first_index=held.sent,
        )
        if self.healed or self.rng.random() >= self.profile.word_loss:
            self._fly(lambda: self._send(word))
        self._fly(lambda: self._end_lease(move))

    def _end_lease(self, move: Move) -> None:
        held = move.source.held
        if held is None or held.frozen != move.id:
            return  # it thawed: the lease is over, whatever the migrator believes
        move.source.fence = max(move.source.fence, held.epoch)
        move.source.held = None

    def _thaw(self) -> None:
        for worker in self.workers.values():
            if worker.held is not None and worker.held.frozen and (self.healed or self.rng.random() < 0.3):
                worker.held.frozen = ""

    # Time.

    def _tick(self, milliseconds: int) -> None:
        bench = self.bench
        bench.now_ns += milliseconds * MILLISECOND
        for worker in self.workers.values():
            if worker.up and (self.healed or self.rng.random() < 0.9):
                self._route(bench.summary(worker.name))
        for timer in bench.due():
            self._send(TimerFired(name=timer))

    def _deliver(self) -> None:
        if self.flying:
            self.flying.pop(self.rng.randrange(len(self.flying)))()

    def step(self) -> None:
        """Something happens."""
        rng = self.rng
        roll = rng.random()
        worker = rng.choice([*self.workers.values()])
        if roll < 0.5:
            self._deliver()
        elif roll < 0.70:
            self._decode(worker)
        elif roll < 0.77:
            self._start_move()
        elif roll < 0.89 and self.moves:
            self._advance(rng.choice(self.moves[-3:]))
        elif roll < 0.93:
            self._thaw()
        elif roll < 0.97:
            self._tick(rng.choice((10, 60, 250)))
        elif roll < 0.97 + self.profile.death:
            self._die(worker) if worker.up else self._come_back(worker)

    def heal(self) -> None:
        """From now on nothing is lost, nobody dies, and no migrator does anything any more."""
        self.healed = True
        for move in self.moves:
            move.state = "over"
        for worker in self.workers.values():
            if not worker.up:
                self._come_back(worker)
        for _ in range(600):
            self._thaw()
            for _ in range(len(self.flying)):
                self._deliver()
            for worker in self.workers.values():
                self._decode(worker)
            self._tick(250)
            if self.ends and not self.flying and all(w.held is None for w in self.workers.values()):
                return

    def abandon(self) -> None:
        """The client goes away."""
        if not self.ends:
            self._send(CallAbandoned(request="r", reason="disconnected"))
            self.ends.append("CallAbandoned")
