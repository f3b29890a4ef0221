"""The tagger's actor: what it answers, what it learns, what never replaces what, and what it survives."""

import math
from random import Random
from typing import Any

import pytest
from millrace.actor.effects import Effect, Log, Publish, Reply, StartTimer, Stop, Subscribe
from millrace.contracts.local import StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.observers import RequestFinished
from millrace.contracts.status import PresenceState
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.lengths.training import TrainingJob, TrainingResult, train_candidate
from prometheus_client import CollectorRegistry

from services.tagger.actor import MODELS_MAX, TaggerActor
from services.tagger.config import LearningConfig
from services.tagger.effects import (
    KeepingFailed,
    KeepOutcomes,
    LengthsLoaded,
    LengthsTrained,
    TrainingFailed,
    TrainLengths,
)
from services.tagger.metrics import TaggerMetrics
from services.tagger.state import PendingRequests, ServedLengths
from tests.testbed.messages import plain

LEARNING = LearningConfig(directory="somewhere", retrain_outcomes=200, outcomes_min=200, retrain_pause_s=0.0)


def _actor(learning: LearningConfig | None = None, **given: Any) -> TaggerActor:
    given |= {} if learning is None else {"learning": learning}
    return TaggerActor(name="tagger-0", cluster="local", incarnation=7, **given)


class Talk:
    """Asks a tagger and tells it outcomes, as ingress does. Trainings are done at once where ``trains`` is set."""

    def __init__(self, tagger: TaggerActor, *, trains: bool = True) -> None:
        self.tagger = tagger
        self.trains = trains
        self.number = 0
        self.now_ns = 1
        self.others: list[Effect] = []
        self.trainings: list[TrainingJob] = []

    def tell(self, body) -> list[Effect]:
        self.now_ns += 1_000_000
        effects = self.tagger.handle(Message(body, reply_to="_INBOX.x"), self.now_ns)
        self.tagger.check_invariants()
        for effect in effects:
            if isinstance(effect, TrainLengths):
                self._train(effect.job)
            else:
                self.others.append(effect)
        return effects

    def _train(self, job: TrainingJob) -> None:
        self.trainings.append(job)
        if self.trains:
            result = train_candidate(job)
            self.tell(LengthsTrained(model=job.model, result=result))

    def ask(self, prompt: str = "", **fields) -> LengthTag:
        self.number += 1
        request = {"request": f"r{self.number}", "model": "m", "prompt_tokens": 12, "max_tokens": 2000}
        (reply,) = self.tell(TagRequest(**(request | {"prompt": prompt} | fields)))
        assert isinstance(reply, Reply)
        return reply.body

    def finish(self, *lengths: int, **fields) -> list[Effect]:
        given = {"output_tokens": list(lengths), "finish_reasons": ["stop"] * len(lengths)}
        return self.tell(plain(RequestFinished, **{"request": f"r{self.number}"} | given | fields))

    def asked_and_finished(self, prompt: str, length: int, **fields) -> LengthTag:
        tag = self.ask(prompt, **fields)
        self.finish(length)
        return tag


def _counting(rng: Random) -> tuple[str, int]:
    """A prompt whose numbers decide its length, with a tenth of noise."""
    first, span = rng.randrange(100), rng.randrange(1, 300)
    return f"Count from {first} to {first + span}.", max(1, round(span * rng.lognormvariate(0, 0.1)))


def test_nothing_is_read_trained_or_kept_unless_asked_for() -> None:
    talk = Talk(_actor())
    effects = talk.tagger.start(0)
    rng = Random(1)
    for _ in range(600):
        talk.asked_and_finished(*_counting(rng))
    talk.tell(TimerFired(name="heartbeat"))
    kinds = {type(effect) for effect in [*effects, *talk.others]}
    assert kinds == {Subscribe, Publish, StartTimer, Reply}


def test_a_request_that_wants_no_answer_gets_none() -> None:
    assert _actor().handle(Message(TagRequest(request="r", model="m", prompt_tokens=3, max_tokens=9)), 5) == []


def test_after_outcomes_history_answers_in_order_and_within_bounds() -> None:
    talk = Talk(_actor())
    for length in (5, 50, 500, 5):
        talk.asked_and_finished("Hello", length)
    tag = talk.ask("Hello", max_tokens=40)
    assert tag.source == "history"
    assert 1 <= tag.mean <= 40
    assert 1 <= tag.p50 <= tag.p90 <= 40


@pytest.mark.parametrize("fields", [{"min_tokens": 30, "max_tokens": 30}, {"max_tokens": 1}])
def test_a_request_that_states_its_length_passes_through(fields: dict) -> None:
    tag = Talk(_actor()).ask("Hello", **fields)
    assert (tag.mean, tag.p50, tag.p90, tag.source) == (*[float(fields["max_tokens"])] * 3, "stated")


def test_its_error_falls_as_outcomes_come_and_a_model_takes_over_from_history() -> None:
    registry = CollectorRegistry()
    talk = Talk(_actor(LEARNING, metrics=TaggerMetrics(registry)))
    rng = Random(3)
    errors: list[float] = []
    for _ in range(1200):
        prompt, length = _counting(rng)
        tag = talk.asked_and_finished(prompt, length)
        errors.append(abs((tag.p50 or 0.0) - length))
    first, last = errors[:200], errors[-200:]
    assert sum(last) < 0.4 * sum(first)

    def shown(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"millrace_tagger_{name}", labels)

    assert shown("trainings_total", result="replaced") >= 1
    assert shown("answers_total", source="model") > 500
    assert shown("recent_error_tokens", source="model") < 0.5 * shown("recent_error_tokens", source="history")
    assert shown("file_problems_total") == 0


def test_trainings_are_apart_by_their_pause() -> None:
    pause = LearningConfig(retrain_outcomes=10, outcomes_min=10, retrain_pause_s=3600.0)
    talk = Talk(_actor(pause), trains=False)
    talk.now_ns = 10**18
    for _ in range(100):
        talk.asked_and_finished("Hello", 5)
    talk.tell(TrainingFailed(model="m", detail="killed"))
    for _ in range(100):
        talk.asked_and_finished("Hello", 5)
    assert len(talk.trainings) == 1


def test_a_model_that_is_not_better_is_counted_logged_and_dropped() -> None:
    talk = Talk(_actor(LEARNING), trains=False)
    for _ in range(500):
        talk.asked_and_finished("Hello", 5)
    result = TrainingResult(model=b"whatever", accepted=False, reason="it is not better")
    (log,) = talk.tell(LengthsTrained(model="m", result=result))
    assert (log.fields["replaced"], log.fields["reason"]) == (False, "it is not better")
    assert talk.tagger.metrics.trainings.plain() == {"kept": 1}
    assert talk.ask("Hello").source == "history"


def test_outcomes_are_kept_once_a_second_and_at_the_end() -> None:
    talk = Talk(_actor(LEARNING))
    talk.asked_and_finished("Hello", 5)
    talk.asked_and_finished("Hello", 6)
    keep, *_ = talk.tell(TimerFired(name="heartbeat"))
    assert isinstance(keep, KeepOutcomes)
    assert [sample.lengths for sample in keep.samples] == [[5], [6]]
    assert not [e for e in talk.tell(TimerFired(name="heartbeat")) if isinstance(e, KeepOutcomes)]
    talk.asked_and_finished("Hello", 7)
    keep, presence, stop = talk.tell(StopRequested())
    assert isinstance(keep, KeepOutcomes)
    assert presence.body.state is PresenceState.LEAVING
    assert isinstance(stop, Stop)


def test_a_file_that_cannot_be_written_is_logged_once_and_answers_go_on() -> None:
    talk = Talk(_actor(LEARNING))
    assert [type(e) for e in talk.tell(KeepingFailed(model="m", detail="disk full"))] == [Log]
    assert talk.tell(KeepingFailed(model="m", detail="disk full")) == []
    assert talk.tagger.metrics.file_problems == 2
    assert talk.ask("Hello").source == "unknown"


def test_a_model_of_another_version_falls_back_to_history_with_one_log_line() -> None:
    talk = Talk(_actor(LEARNING))
    loaded = LengthsLoaded(models={"m": b"of an older version"}, outcomes={}, problems={"x/lengths.model": "torn"})
    logs = talk.tell(loaded)
    assert [type(effect) for effect in logs] == [Log, Log]
    assert talk.tell(loaded) == []
    assert talk.ask("Hello").source == "unknown"
    talk.finish(5)
    assert talk.ask("Hello").source == "history"


def test_several_choices_teach_each_their_length_and_an_outcome_said_twice_is_learnt_once() -> None:
    talk = Talk(_actor())
    talk.ask("Hello", n=2)
    talk.finish(10, 30)
    talk.finish(10, 30)
    assert talk.tagger.metrics.outcomes.plain() == {"learnt": 1, "unmatched": 1}
    assert talk.tagger.snapshot()["models"]["m"]["outcomes"] == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "cancelled"},
        {"outcome": "failed"},
        {"output_tokens": []},
        {"output_tokens": [0]},
        {"finish_reasons": ["stop", "error"], "output_tokens": [5, 6]},
    ],
)
def test_outcomes_that_teach_nothing_teach_nothing(fields: dict) -> None:
    talk = Talk(_actor())
    talk.ask("Hello")
    talk.finish(5, **fields)
    assert talk.tagger.metrics.outcomes.plain() == {"unusable": 1}
    assert talk.ask("Hello").source == "unknown"


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""},
        {"prompt_tokens": 2**62},
        {"max_tokens": 0},
        {"max_tokens": 2**62},
        {"min_tokens": -(2**62)},
        {"temperature": math.nan},
        {"n": -3},
        {"prompts": 0},
        {"prompt": "\ud800" * 3},
        {"prompt": "9" * 2048},
        {"structured": "something new"},
        {"key": "k" * 10_000},
    ],
)
def test_absurd_requests_are_answered_with_numbers_in_order(fields: dict) -> None:
    talk = Talk(_actor())
    for length in (5, 500):
        talk.asked_and_finished("Hello", length)
    tag = talk.ask(**fields)
    talk.finish(7)
    assert tag.source == "unknown" or (
        tag.mean is not None
        and tag.p50 is not None
        and tag.p90 is not None
        and all(map(math.isfinite, (tag.mean, tag.p50, tag.p90)))
        and tag.p50 <= tag.p90
    )


def test_of_more_models_than_it_can_hold_it_knows_nothing() -> None:
    talk = Talk(_actor())
    for number in range(MODELS_MAX + 5):
        talk.ask(model=f"m{number}")
        talk.finish(5)
    assert talk.ask(model="m0").source == "history"
    assert talk.ask(model=f"m{MODELS_MAX + 1}").source == "unknown"


def test_models_whose_names_share_a_subject_share_what_is_learnt() -> None:
    talk = Talk(_actor())
    talk.ask(model="llama-3.1")
    talk.finish(5)
    assert talk.ask(model="llama-3_1").source == "history"


def test_answered_requests_are_forgotten_oldest_first() -> None:
    pending = PendingRequests(size_max=2)
    for name in ("a", "b", "c"):
        request = TagRequest(request=name, model="m", prompt_tokens=1, max_tokens=9)
        pending.add(ServedLengths(None).answer(request))
    assert pending.pop("a") is None
    assert pending.pop("b") is not None
    assert len(pending) == 1
