"""A driver of one IngressActor for unit tests: what a runtime would do, with lists in place of a bus."""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any, TypeVar

from millrace.actor.effects import Effect, Gather, Publish, Request, StartTimer
from millrace.contracts.ingress import FinishReason, ReturnReason, SequencesReturned, TokenChunk, TokensGenerated
from millrace.contracts.local import (
    BucketReady,
    Gathered,
    KeyChanged,
    Replied,
    RequestFailed,
    RequestFailure,
    TimerFired,
)
from millrace.contracts.message import Message
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.predictor import LatencyPrediction
from millrace.contracts.status import InstanceSummary, PresenceState, ServicePresence
from millrace.contracts.worker import Sampling, SequenceAccepted, SubmitSequence
from millrace.judging.confidence import ConfidenceModel
from tokenizers import Tokenizer, decoders, models

from services.ingress.build import build
from services.ingress.calls.messages import Call, CallKind, CallSubmitted, DeliverDeltas
from services.ingress.config import DispatchConfig, IngressConfig, TaggingConfig
from services.ingress.lifecycle import SequencePhase
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressDeps, IngressState
from services.ingress.tokens.detokenizer import TextModel, TokenizerVocabulary
from services.ingress.transitions import TRANSITIONS, react
from tests.testbed.messages import plain_record

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
START = 1_000 * SECOND
MODEL = "tiny"
EOS = 26
#: Ids 0 to 25 are the letters a to z, 26 the end of sequence.
_VOCAB = {chr(ord("a") + i): i for i in range(26)} | {"</s>": EOS}

#: Of a summary.
COUNTS = ("running", "waiting", "running_tokens", "waiting_prefill_tokens", "preemptions", "output_tokens_total")

E = TypeVar("E", bound=Effect)


def letters_vocabulary() -> TokenizerVocabulary:
    tokenizer = Tokenizer(models.BPE(vocab=_VOCAB, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return TokenizerVocabulary(tokenizer)


VOCABULARY = letters_vocabulary()
NO_TAG = TaggingConfig(mode="never")
#: A policy that asks nobody: a sequence is submitted at once.
PLAIN = DispatchConfig(policy="join_shortest_queue")


class TransitionLog:
    """Stands between an ingress and its reactions, and checks that each change of a sequence's state was an event's."""

    def __init__(self) -> None:
        self.taken: set[tuple[SequencePhase, type[Any]]] = set()
        self._expected: dict[OpenSequence, frozenset[SequencePhase]] = {}

    def react(self, state: IngressState, sequence: OpenSequence, event: Any) -> None:
        self._check(sequence)
        rows = TRANSITIONS.rows(sequence.phase, type(event))
        self.taken.add((sequence.phase, type(event)))
        self._expected[sequence] = frozenset(row.target for row in rows)
        react(state, sequence, event)

    def _check(self, sequence: OpenSequence) -> None:
        expected = self._expected.get(sequence, frozenset({SequencePhase.WAITING}))
        assert sequence.phase in expected, f"{sequence.id} became {sequence.phase} without an event"

    def check(self, state: IngressState) -> None:
        for sequence in state.sequences.values():
            self._check(sequence)
        for sequence in [s for s in self._expected if s.id not in state.sequences]:
            assert sequence.phase is SequencePhase.ENDED
            self._check(sequence)
            del self._expected[sequence]


class Bench:
    """An ingress with a clock, its open requests and everything that it let out."""

    def __init__(
        self,
        config: IngressConfig | None = None,
        *,
        instances: int = 2,
        seed: int = 1,
        model_of: Mapping[str, str] | None = None,
        judges: Mapping[str, ConfidenceModel] = MappingProxyType({}),
    ) -> None:
        """``model_of``: model of each instance; ``instances`` of one where there is none. ``judges``: by model."""
        self.config = config or IngressConfig(tagging=NO_TAG, dispatch=PLAIN)
        self.now_ns = START
        self.model_of = {f"w{i}": MODEL for i in range(instances)} if model_of is None else dict(model_of)
        served = {MODEL, *self.model_of.values()} if model_of is None else set(self.model_of.values())
        models = {name: TextModel(VOCABULARY, frozenset({EOS}), judges.get(name)) for name in served}
        self.actor = build(self.config, IngressDeps(incarnation=7, rng=Random(seed), models=models))
        self.metrics = self.actor.state.metrics
        self.transitions = TransitionLog()
        self.actor.state.bind(self.transitions.react)
        self.started = self.actor.start(START)
        self.effects: list[Effect] = list(self.started)
        self.actor.handle(Message(BucketReady(bucket="plan")), START)
        self.summary_at = dict.fromkeys(self.model_of, 0)
        self.incarnations = dict.fromkeys(self.model_of, 1)
        for model in dict.fromkeys(self.model_of.values()):
            self.plan(*(name for name, of in self.model_of.items() if of == model), model=model)
        for name in self.model_of:
            self.register(name)
            self.summary(name)
        self.effects.clear()

    def send(self, body: Any, reply_to: str = "") -> list[Effect]:
        """Handles one message; effects are returned, kept, and the invariants hold after it."""
        out = self.actor.handle(Message(body=body, reply_to=reply_to), self.now_ns)
        self.effects += out
        self.actor.check_invariants()
        self.transitions.check(self.actor.state)
        return out

    def plan(self, *names: str, epoch: int = 1, model: str = MODEL) -> list[Effect]:
        stage = Stage(name="s0", length_min=0, length_max=None, instances=list(names))
        value = Plan(model=model, epoch=epoch, stages=[stage], coordinator="c0")
        return self.send(KeyChanged(bucket="plan", key=model, value=value, revision=epoch))

    def register(self, name: str, *, max_model_len: int = 4096, max_sequences: int = 64) -> list[Effect]:
        record = plain_record(
            name,
            incarnation=self.incarnations[name],
            model=self.model_of.get(name, MODEL),
            max_model_len=max_model_len,
            max_sequences=max_sequences,
            blocks_total=1000,
        )
        return self.send(KeyChanged(bucket="instance", key=name, value=record, revision=1))

    def summary(self, name: str, **fields: Any) -> list[Effect]:
        self.summary_at[name] = max(self.summary_at[name] + 1, self.now_ns)
        values = dict.fromkeys(COUNTS, 0) | {"blocks_free": 1000, "blocks_total": 1000, "block_size": 16} | fields
        return self.send(
            InstanceSummary(
                instance=name,
                incarnation=self.incarnations[name],
                model=self.model_of.get(name, MODEL),
                at_ns=self.summary_at[name],
                **values,
            )
        )

    def summaries(self) -> None:
        for name in self.summary_at:
            self.summary(name)

    def die(self, name: str, incarnation: int | None = None) -> list[Effect]:
        """Its supervisor says that a worker has died; 0 for every incarnation, without one the present."""
        ended = self.incarnations[name] if incarnation is None else incarnation
        dead = PresenceState.DEAD
        return self.send(ServicePresence(role="worker", name=name, incarnation=ended, at_ns=self.now_ns, state=dead))

    def engine_dies(self, name: str) -> list[Effect]:
        """A worker whose engine died hands back what it had."""
        had = [(each.id, each.epoch) for each in self.actor.state.owned.get(name, {}).values()]
        why, incarnation = ReturnReason.ENGINE_DIED, self.incarnations[name]
        return self.send(SequencesReturned(instance=name, incarnation=incarnation, reason=why, sequences=had))

    def come_back(self, name: str) -> None:
        """A new incarnation registers, and is heard."""
        self.incarnations[name] = self.now_ns + 1
        self.register(name)
        self.summary(name)

    def pass_time(
        self, seconds: float, *, alive: tuple[str, ...] | None = None, step_ns: int = 250 * MILLISECOND
    ) -> None:
        """Lets timers fire and heartbeats come; instances not in ``alive`` are silent."""
        end_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + step_ns)
            for name in self.summary_at if alive is None else alive:
                self.summary(name)
            for timer in [*self.due()]:
                self.send(TimerFired(name=timer))

    def due(self) -> list[str]:
        """Takes the names of timers that are due."""
        latest: dict[str, int] = {}
        for effect in [*self.started, *self.effects]:
            if isinstance(effect, StartTimer):
                latest[effect.name] = effect.at_ns
        due = [name for name, at_ns in latest.items() if at_ns <= self.now_ns]
        keep = [e for e in self.effects if not (isinstance(e, StartTimer) and e.name in due)]
        self.effects[:] = keep
        self.started = [e for e in self.started if not (isinstance(e, StartTimer) and e.name in due)]
        return due

    # Calls.

    def call(self, request: str = "r", **fields: Any) -> list[Effect]:
        return self.send(CallSubmitted(call=make_call(request, **fields)))

    def submissions(self) -> list[Request]:
        """Every SubmitSequence so far."""
        return [e for e in self.effects if isinstance(e, Request) and isinstance(e.body, SubmitSequence)]

    def last_submission(self) -> tuple[Request, str]:
        """The newest one and the instance that it went to."""
        request = self.submissions()[-1]
        return request, instance_of(request)

    def accept(self, request: Request | None = None) -> list[Effect]:
        request = request or self.submissions()[-1]
        assert isinstance(request.body, SubmitSequence)
        body = SequenceAccepted(sequence=request.body.sequence, epoch=request.body.epoch)
        return self.reply(request, body)

    def reply(self, request: Request, body: Any) -> list[Effect]:
        return self.send(Replied(correlation=request.correlation, body=body))

    def fail(self, request: Request, reason: RequestFailure) -> list[Effect]:
        return self.send(RequestFailed(correlation=request.correlation, reason=reason))

    def gather(self) -> Gather:
        """The newest question to predictors."""
        return [e for e in self.effects if isinstance(e, Gather)][-1]

    def gathered(self, *answers: Any, to: Gather | None = None) -> list[Effect]:
        """Answers the newest question to predictors, or the given one, with these bodies."""
        pairs = [("predictor-0", answer) for answer in answers]
        return self.send(Gathered(correlation=(to or self.gather()).correlation, answers=pairs))

    def predicted(self, instance: str, e2e_ms: float, ttft_ms: float = 1.0, **fields: Any) -> LatencyPrediction:
        """Build a predictor's answer about an instance."""
        values = {"request": "r", "incarnation": self.incarnations.get(instance, 1)} | fields
        return LatencyPrediction(
            instance=instance, e2e_ns=int(e2e_ms * MILLISECOND), ttft_ns=int(ttft_ms * MILLISECOND), **values
        )

    def run_call(self, request: str = "r", **fields: Any) -> str:
        """Submits a call and has it accepted; returns the instance of its (first) sequence."""
        self.call(request, **fields)
        sent = [s for s in self.submissions() if s.request == request]
        for submission in sent:
            self.accept(submission)
        return instance_of(sent[0])

    def tokens(self, instance: str, *chunks: TokenChunk) -> list[Effect]:
        return self.send(
            TokensGenerated(instance=instance, incarnation=self.incarnations[instance], step=1, chunks=list(chunks))
        )

    # What came out.

    def sent(self, kind: type[Any]) -> list[Any]:
        """Bodies of that type that were published or asked."""
        return [e.body for e in self.effects if isinstance(e, Publish | Request) and isinstance(e.body, kind)]

    def made(self, kind: type[E]) -> list[E]:
        """Effects of that type."""
        return [e for e in self.effects if isinstance(e, kind)]

    def asked(self, kind: type[Any]) -> list[Request]:
        """Requests with a body of that type."""
        return [e for e in self.effects if isinstance(e, Request) and isinstance(e.body, kind)]

    def text(self, request: str = "r", index: int = 0) -> str:
        return "".join(
            d.text for e in self.made(DeliverDeltas) if e.request == request for d in e.deltas if d.index == index
        )


def running(request: str = "r", **call: Any) -> tuple[Bench, str]:
    """Two instances and a call that one of them, which is returned, has accepted."""
    bench = Bench()
    return bench, bench.run_call(request, **call)


def make_call(request: str = "r", **fields: Any) -> Call:
    values: dict[str, Any] = {
        "kind": CallKind.COMPLETION,
        "model": MODEL,
        "prompts": [[1, 2, 3]],
        "sampling": Sampling(max_tokens=50),
        "stream": True,
    } | fields
    return Call(request=request, **values)


def instance_of(request: Request) -> str:
    return request.subject.split(".")[-2]


def chunk(
    text: str,
    first_index: int = 0,
    *,
    epoch: int = 0,
    sequence: str = "r.0",
    finish: FinishReason | None = None,
    **fields: Any,
) -> TokenChunk:
    """A chunk of letters; ``$`` is the end of sequence."""
    return TokenChunk(
        sequence=sequence, epoch=epoch, first_index=first_index, token_ids=ids(text), finish=finish, **fields
    )


def ids(text: str) -> list[int]:
    return [EOS if c == "$" else ord(c) - ord("a") for c in text]
