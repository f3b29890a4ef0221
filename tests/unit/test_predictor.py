"""The predictor's actor: what it knows, what it answers, what it refuses."""

from typing import Any

import pytest
from millrace.actor.effects import Log, Publish, StartTimer, Stop, Subscribe, Unsubscribe, WatchKeys
from millrace.contracts.local import AskedTogether, StopRequested, TimerFired
from millrace.contracts.message import ErrorReply
from millrace.contracts.predictor import LatencyPrediction, NoPrediction, NoPredictionReason
from millrace.contracts.status import BatchComposition, InstanceSummary, PresenceState, ServicePresence
from millrace.membership.config import MembershipConfig

from services.predictor.answering import STUCK_NS_MAX
from services.predictor.placements import PLACEMENT_NS_MAX, PLACEMENTS_MAX
from tests.testbed.messages import plain_summary
from tests.unit.predictor_rig import (
    MS,
    START_NS,
    STEP_MS,
    Predictor,
    decision,
    outcome,
    question,
    record,
    served,
    snapshot,
    status,
)


def reason(answer: Any) -> str:
    assert isinstance(answer, NoPrediction), answer
    return str(answer.reason)


def e2e_steps(answer: Any) -> float:
    assert isinstance(answer, LatencyPrediction), answer
    return answer.e2e_ns / (STEP_MS * MS)


def summary(**changes: Any) -> InstanceSummary:
    return plain_summary(**{"instance": "w0", "incarnation": 5, "at_ns": START_NS, **changes})


# what it answers


def test_an_idle_instance_takes_one_step_per_token() -> None:
    answer = served().ask()
    assert (answer.request, answer.instance, answer.incarnation) == ("q", "w0", 5)
    assert (answer.ttft_ns, answer.e2e_ns) == (STEP_MS * MS, 10 * STEP_MS * MS)
    assert (answer.others, answer.output_tokens) == (0, 10)


def test_the_way_to_the_engine_counts() -> None:
    answer = served(transit_us=2_000).ask()
    assert (answer.ttft_ns, answer.e2e_ns) == ((STEP_MS + 2) * MS, (10 * STEP_MS + 2) * MS)


def test_the_state_is_rolled_forward_to_the_moment_of_the_question() -> None:
    running = [status(f"r{index}.0", output_tokens=10) for index in range(8)]
    predictor = served(snapshot(running=running, blocks_free=400))
    predictor.now_ns += 25 * STEP_MS * MS
    answer = predictor.ask()
    assert e2e_steps(answer) == 15 + 10
    assert answer.snapshot_age_ns == 25 * STEP_MS * MS


def test_the_instance_is_taken_from_the_subject_where_the_body_names_none() -> None:
    predictor, body = served(), question(instance="")
    subjects = ("mr.local.predict.m.w0", "mr.local.predict.m.w1")
    answers = [predictor.ask(body, subject=subject) for subject in subjects]
    assert (answers[0].instance, e2e_steps(answers[0]), reason(answers[1])) == ("w0", 10, "no_snapshot")
    assert predictor.ask(AskedTogether(body=body, subjects=subjects)).bodies == answers


def test_a_question_without_a_reply_subject_is_not_answered() -> None:
    assert served().send(question()) == []


def test_an_unknown_length_is_the_mean_of_outcomes() -> None:
    predictor = served(default_output_tokens=20)
    unknown = question(expected_output_tokens=None)
    assert e2e_steps(predictor.ask(unknown)) == 20
    for index in range(50):
        predictor.send(outcome(f"r{index}", output_tokens=[60]))
    assert e2e_steps(predictor.ask(unknown)) == 60


def test_lengths_are_not_learnt_where_that_is_switched_off() -> None:
    predictor = served(default_output_tokens=20, learn_lengths=False)
    for index in range(50):
        predictor.send(outcome(f"r{index}", output_tokens=[60]))
    assert e2e_steps(predictor.ask(question(expected_output_tokens=None))) == 20


# placements


def test_a_placement_counts_until_a_snapshot_shows_it() -> None:
    predictor = served()
    for index in range(8):
        predictor.send(decision(f"r{index}", "w0"))
    assert predictor.ask().others == 8
    predictor.now_ns += 3 * STEP_MS * MS
    running = [status(f"r{index}.0", output_tokens=3) for index in range(8)]
    predictor.send(snapshot(step=4, at_ns=predictor.now_ns, running=running, blocks_free=400))
    answer = predictor.ask()
    assert (answer.others, e2e_steps(answer)) == (8, 47 + 10)
    assert predictor.metrics.placements.plain() == {"shown": 8}


def test_a_placement_that_went_elsewhere_counts_there_only() -> None:
    predictor = served()
    predictor.register(record("w1"), key="w1")
    predictor.send(snapshot("w1"))
    predictor.send(decision("r", "w0"))
    predictor.send(decision("r", "w1", kind="continuation"))
    assert predictor.ask().others == 0
    assert predictor.ask(question(instance="w1")).others == 1


def test_a_request_that_ended_between_two_snapshots_leaves_nothing_behind() -> None:
    predictor = served()
    predictor.send(decision("r", "w0"))
    assert predictor.ask().others == 1
    predictor.send(snapshot(step=2, at_ns=START_NS + MS))
    predictor.send(outcome("r"))
    assert predictor.ask().others == 0


def test_a_placement_is_forgotten_after_a_while_whatever_happens() -> None:
    predictor = served()
    predictor.send(decision("r", "w0"))
    predictor.now_ns += PLACEMENT_NS_MAX + 1
    predictor.send(TimerFired(name="heartbeat"))
    predictor.send(snapshot())
    assert predictor.ask().others == 0
    assert predictor.metrics.placements.plain() == {"expired": 1}


def test_placements_at_one_instance_are_bounded() -> None:
    predictor = served()
    said = []
    for index in range(PLACEMENTS_MAX + 5):
        said += predictor.send(decision(f"r{index}", "w0"))
    assert [effect.event for effect in said if isinstance(effect, Log)] == ["bound_reached"]
    assert predictor.metrics.placements.plain() == {"full": 5}


# what it remembers


@pytest.mark.parametrize("lengths", [{"prompt_tokens": 0}, {"output_tokens": -1}, {"max_tokens": 1 << 60}])
def test_a_decision_without_sensible_lengths_is_counted_and_left_out(lengths: dict[str, int]) -> None:
    predictor = served()
    predictor.send(decision("r", "w0", **lengths))
    assert predictor.ask().others == 0
    assert predictor.metrics.placements.plain() == {"unusable": 1}


# why it does not answer


def test_nothing_is_told_of_another_model_nor_of_an_instance_that_drains_or_left() -> None:
    predictor = served()
    assert reason(predictor.ask(question(model="other"))) == NoPredictionReason.OTHER_MODEL
    predictor.send(summary(draining=True))
    assert reason(predictor.ask()) == NoPredictionReason.DRAINING
    left = served()
    left.register(None)
    assert reason(left.ask()) == NoPredictionReason.NO_SNAPSHOT


def test_a_silent_instance_is_stale_until_it_says_something() -> None:
    predictor = served()
    predictor.now_ns += MembershipConfig().instance_silence_ns + 1
    assert reason(predictor.ask()) == NoPredictionReason.STALE_SNAPSHOT
    predictor.send(summary())
    assert e2e_steps(predictor.ask()) == 10


def test_an_engine_that_hangs_is_stale_although_its_worker_talks() -> None:
    running = [status("r.0", output_tokens=10)]
    predictor = served(snapshot(running=running, blocks_free=400))
    predictor.now_ns += STUCK_NS_MAX + 1
    predictor.send(snapshot(running=running, blocks_free=400))
    assert reason(predictor.ask()) == NoPredictionReason.STALE_SNAPSHOT


def test_a_dead_process_has_no_future() -> None:
    predictor = served()
    dead = ServicePresence(role="worker", name="w0", incarnation=0, at_ns=START_NS, state=PresenceState.DEAD)
    predictor.send(dead)
    assert reason(predictor.ask()) == NoPredictionReason.NO_SNAPSHOT
    predictor.send(snapshot(step=9))
    assert reason(predictor.ask()) == NoPredictionReason.NO_SNAPSHOT
    predictor.register(record(incarnation=START_NS + 1))
    predictor.send(snapshot(incarnation=START_NS + 1))
    assert e2e_steps(predictor.ask()) == 10


# bad input


@pytest.mark.parametrize(
    "field",
    [
        {"prompt_tokens": 0},
        {"prompt_tokens": -5},
        {"prompt_tokens": 1 << 40},
        {"max_tokens": 0},
        {"max_tokens": 1 << 63},
        {"output_tokens": -1},
        {"sequences": 0},
        {"sequences": 100_000},
    ],
)
def test_an_absurd_question_is_answered_as_malformed(field: dict[str, int]) -> None:
    answer = served().ask(question(**field))
    assert isinstance(answer, ErrorReply)
    assert (answer.reason, next(iter(field)) in answer.detail) == ("malformed", True)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"model": "other", "step": 9}, "other_model"),
        ({"incarnation": 4, "step": 9}, "other_incarnation"),
        ({"step": 0}, "old"),
        ({"at_ns": START_NS - 1}, "old"),
        ({"blocks_free": -1, "step": 9}, "absurd"),
        ({"blocks_free": 513, "step": 9}, "absurd"),
        ({"at_ns": 1 << 63, "step": 9}, "ahead"),
        ({"at_ns": START_NS + 1_001 * MS, "step": 9}, "ahead"),
        ({"step_duration_ns": -1, "step": 9}, "absurd"),
        ({"batch": BatchComposition(decodes=-1), "step": 9}, "absurd"),
        ({"batch": BatchComposition(decodes=1, prefill_work=float("nan")), "step": 9}, "absurd"),
        ({"instance": "stranger"}, "unregistered"),
    ],
)
def test_a_snapshot_that_cannot_be_changes_nothing(wrong: dict[str, Any], why: str) -> None:
    predictor = served(snapshot(running=[status("r.0", output_tokens=10)], blocks_free=400))
    predictor.send(snapshot(**wrong))
    assert predictor.metrics.snapshots.plain() == {"taken": 1, why: 1}
    assert predictor.ask().others == 1


def test_a_refused_snapshot_is_said_once_with_its_instance_and_why() -> None:
    predictor = served()
    said = [effect for step in (9, 10, 11) for effect in predictor.send(snapshot(blocks_free=-1, step=step))]
    assert [(effect.event, effect.fields) for effect in said if isinstance(effect, Log)] == [
        ("snapshot_refused", {"instance": "w0", "why": "absurd"})
    ]


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"max_sequences": -1}, {"token_budget": 1 << 70}])
def test_a_record_that_no_engine_can_have_is_said_once(wrong: dict[str, Any]) -> None:
    predictor = Predictor()
    said = predictor.register(record(**wrong)) + predictor.register(record(**wrong))
    assert [effect.event for effect in said if isinstance(effect, Log)] == ["instance_unusable"]
    assert reason(predictor.ask()) == NoPredictionReason.NO_SNAPSHOT


def test_a_missing_step_time_set_is_said_once_and_counted() -> None:
    predictor = Predictor()
    said = predictor.register(record(step_time="nowhere.toml"))
    said += predictor.register(record("w1", step_time="nowhere.toml"), key="w1")
    assert [effect.event for effect in said if isinstance(effect, Log)] == ["step_time_unknown"]
    predictor.send(snapshot())
    assert reason(predictor.ask()) == NoPredictionReason.NO_STEP_TIME
    assert predictor.metrics.missing_sets == 2


# which instances


def test_it_serves_every_instance_in_the_queue_group() -> None:
    effects = Predictor().actor.start(0)
    subscriptions = {e.subject: e.queue_group for e in effects if isinstance(e, Subscribe)}
    assert subscriptions["mr.local.predict.*.*"] == "predictor"
    assert subscriptions["mr.local.status.*.*"] == ""
    assert [e for e in effects if isinstance(e, WatchKeys)] == [WatchKeys(bucket="instance")]


def test_shards_serve_each_instance_once() -> None:
    shards = [Predictor(shard=index, shards=3) for index in range(3)]
    names = [f"w{index}" for index in range(30)]
    for predictor in shards:
        assert not [e for e in predictor.actor.start(0) if isinstance(e, Subscribe) and "predict" in e.subject]
    for name in names:
        effects = [e for shard in shards for e in shard.register(record(name), key=name) if isinstance(e, Subscribe)]
        assert [e.subject for e in effects if e.queue_group] == [f"mr.local.predict.*.{name}"]
        assert len(effects) == 3
    assert all(3 < len(shard.actor.snapshot()["instances"]) < 20 for shard in shards)


def test_a_shard_stops_listening_to_an_instance_that_left() -> None:
    predictor = Predictor(shard=0, shards=2)
    predictor.register(record())
    effects = predictor.register(None)
    assert [e.subject for e in effects if isinstance(e, Unsubscribe)] == [
        "mr.local.status.*.w0",
        "mr.local.summary.*.w0",
        "mr.local.predict.*.w0",
    ]


def test_a_shard_beyond_the_last_is_refused() -> None:
    with pytest.raises(ValueError, match="shard"):
        Predictor(shard=3, shards=3)


def test_it_shows_presence_and_leaves_in_order() -> None:
    predictor = Predictor()
    told = predictor.send(TimerFired(name="heartbeat")) + predictor.send(StopRequested())
    assert [type(effect) for effect in told] == [Publish, StartTimer, Publish, Stop]
    alive, leaving = (effect.body for effect in told if isinstance(effect, Publish))
    assert (alive.role, alive.name, alive.incarnation) == ("predictor", "predictor-0", 7)
    assert leaving.state is PresenceState.LEAVING
