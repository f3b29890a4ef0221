"""A recorded run of a real engine, and its replay on the model: the proof that both schedule alike.

A recording holds the order of everything that reached the engine's scheduler (adds, cancels, steps scheduled, steps
settled) and what each scheduled step computed. The replay gives the model the same adds, cancels and sampled tokens in
the same order, and returns what it would have computed.
"""

import random
import zlib
from array import array
from collections.abc import Sequence
from enum import StrEnum

import msgspec
from millrace.actor.engine import EngineSequence
from millrace.contracts.ingress import FinishReason
from millrace.contracts.worker import Sampling
from millrace.enginemodel.batch import Batch
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.scheduler import Scheduler
from millrace.enginemodel.sequence import ScheduledSequence
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.enginemodel.stream import ModelledSequence
from millrace.enginemodel.tokens import OutputLengths, Vocabulary

FIRST_TOKEN, VOCABULARY_SIZE = 6, 640  # prompts are drawn from these ids


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a run; named by its index in the run.

    Attributes:
        prompt: Parts as pairs (seed, length): requests that share leading parts share a prefix.
        arrival: Given to the engine as arrival time.
        output: Tokens that the engine sampled, the last one ending it unless it was cancelled.
        finish: How it ended.
    """

    prompt: list[tuple[int, int]]
    max_tokens: int
    arrival: int = 0
    output: list[int] = []
    finish: FinishReason = FinishReason.LENGTH


class RecordedStep(msgspec.Struct, frozen=True, array_like=True):
    """Decision of one call of the scheduler.

    Attributes:
        batch: Triples (request, tokens, tokens computed before), in order. Empty where nothing was to do.
        preempted: Requests, in order.
        free: Blocks free after scheduling.
        tables: Checksum over ``tables_told`` of all running requests, in order.
        waiting: Length of the queue.
    """

    batch: list[tuple[int, int, int]]
    preempted: list[int]
    free: int
    tables: int
    waiting: int


class Happening(StrEnum):
    """Kind of event that reached the scheduler."""

    ADD = "add"
    CANCEL = "cancel"
    SCHEDULE = "schedule"  # the next of the run's steps
    SETTLE = "settle"  # the oldest step with a batch that is not settled yet


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        about: What this run is for.
        engine: Name and version of the recorded engine.
        log: Pairs (happening, request index); the index is 0 where there is no request.
    """

    name: str
    about: str
    engine: str
    parameters: EngineParameters
    requests: list[RecordedRequest]
    log: list[tuple[Happening, int]]
    steps: list[RecordedStep]


def prompt_tokens(parts: list[tuple[int, int]]) -> list[int]:
    """Token ids of a prompt that is given by its parts."""
    tokens: list[int] = []
    for seed, length in parts:
        rng = random.Random(seed)
        tokens += [rng.randrange(FIRST_TOKEN, VOCABULARY_SIZE) for _ in range(length)]
    return tokens


def tables_told(tables: Sequence[list[int]]) -> list[int]:
    """Return what a recording tells of a sequence's block tables: of one group the ids, of several the number."""
    return list(tables[0]) if len(tables) == 1 else [sum(block != 0 for table in tables for block in table)]


def table_checksum(tables: list[list[int]]) -> int:
    """One number for block tables in order: ids, not only their counts, must agree."""
    checksum = 0
    for table in tables:
        checksum = zlib.crc32(array("i", [len(table), *table]).tobytes(), checksum)
    return checksum


def replay(run: RecordedRun) -> list[RecordedStep]:
    """The steps of the model under the adds, cancels and tokens of a recorded run."""
    engine = _ReplayEngine(run)
    steps: list[RecordedStep] = []
    for happening, index in run.log:
        match happening:
            case Happening.ADD:
                refusal = engine.add(_source(run.requests[index], index))
                assert refusal is None, refusal
            case Happening.CANCEL:
                engine.cancel([str(index)])
            case Happening.SCHEDULE:
                steps.append(_recorded(engine, engine.schedule(0)))
            case Happening.SETTLE:
                engine.complete_step(0, with_snapshot=False)
        engine.check_invariants()
    return steps


def _source(request: RecordedRequest, index: int) -> EngineSequence:
    return EngineSequence(
        sequence=str(index),
        prompt_token_ids=prompt_tokens(request.prompt),
        sampling=Sampling(max_tokens=request.max_tokens),
        arrival_ns=request.arrival,
    )


def _recorded(engine: ModelledEngine, batch: Batch) -> RecordedStep:
    scheduler = engine.scheduler
    triples = zip(batch.sequences, batch.counts, batch.computed_before, strict=True)
    return RecordedStep(
        [(int(sequence.sequence), count, before) for sequence, count, before in triples],
        [int(sequence.sequence) for sequence in batch.preempted],
        scheduler.pool.free,
        table_checksum([tables_told(_tables(sequence, scheduler)) for sequence in scheduler.running]),
        len(scheduler.waiting),
    )


def _tables(sequence: ScheduledSequence, scheduler: Scheduler) -> list[list[int]]:
    return [sequence.blocks, sequence.beside] if scheduler.beside else [sequence.blocks]


class _ReplaySequence(ModelledSequence):
    """Says what the recorded request said."""

    __slots__ = ("_finish", "_output")

    def __init__(self, source: EngineSequence, request: RecordedRequest, max_model_len: int) -> None:
        vocabulary = Vocabulary(size=VOCABULARY_SIZE)
        super().__init__(
            source, vocabulary=vocabulary, table=[0], lengths=OutputLengths(sigma=0), max_model_len=max_model_len
        )
        self._output = request.output
        self._finish = request.finish
        self.check_at = 0

    def next_token(self) -> int:
        return self._output[self.total - self.prompt_tokens]

    def ended(self, token: int) -> FinishReason | None:
        over = self.total - self.prompt_tokens == len(self._output) and self._finish is not FinishReason.CANCELLED
        return self._finish if over else None


class _ReplayEngine(ModelledEngine):
    """The model with recorded tokens."""

    def __init__(self, run: RecordedRun) -> None:
        super().__init__(run.parameters, LinearStepTime(fixed=1), vocabulary=Vocabulary(size=VOCABULARY_SIZE))
        self._run = run

    def _sequence(self, source: EngineSequence) -> ModelledSequence:
        request = self._run.requests[int(source.sequence)]
        return _ReplaySequence(source, request, self.parameters.max_model_len)
