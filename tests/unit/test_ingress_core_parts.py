"""Parts of ingress's core by themselves: admission, the view of the cluster, metrics, choice of traces."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.actor.metric_set import LabelledCounter
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.status import InstanceSummary

from services.ingress.calls import limits
from services.ingress.calls.limits import AdmissionLimits, TokenBucket
from services.ingress.calls.messages import KeyLimits, RefusalKind
from services.ingress.cluster.cluster_view import IngressClusterView
from services.ingress.config import LimitsConfig
from services.ingress.http.open_calls import Tracer
from tests.testbed.messages import plain_summary
from tests.unit.ingress_core import SECOND, START, make_call

MINUTE = 60 * SECOND


def summary(name: str, at_ns: int, *, incarnation: int = 1, **fields: int | bool) -> InstanceSummary:
    return plain_summary(name, incarnation=incarnation, at_ns=at_ns, **fields)


def plan(*stages: Stage, epoch: int = 1) -> Plan:
    return Plan(model="m", epoch=epoch, stages=list(stages), coordinator="c")


def stage(name: str, low: int, high: int | None, *instances: str) -> Stage:
    return Stage(name=name, length_min=low, length_max=high, instances=list(instances))


# Admission.


@given(
    per_minute=st.integers(1, 10_000),
    spent=st.integers(0, 30_000),
    pause_ns=st.integers(0, 2 * MINUTE),
    amount=st.integers(1, 20_000),
)
def test_a_bucket_holds_a_minutes_worth_refills_evenly_and_tells_the_time_that_is_enough(
    per_minute, spent, pause_ns, amount
):
    bucket, now_ns = TokenBucket(per_minute, START), START + pause_ns
    bucket.take(spent, START)
    level = min(per_minute, per_minute - spent + pause_ns * per_minute / MINUTE)
    wait_ns = bucket.wait_ns(amount, now_ns)
    assert wait_ns == pytest.approx(max(0.0, min(amount, per_minute) - level) * MINUTE / per_minute, abs=1_000)
    assert bucket.wait_ns(amount, now_ns + wait_ns + 1_000) == 0


def test_limits_that_change_in_the_key_file_hold_for_the_next_call():
    door = AdmissionLimits(LimitsConfig())
    tight = make_call("a", key="k", limits=KeyLimits(requests_per_minute=1))
    assert door.admit(tight, 1, 3, START) is None
    assert door.admit(tight, 1, 3, START).kind is RefusalKind.RATE_LIMITED
    wide = make_call("b", key="k", limits=KeyLimits(requests_per_minute=600))
    assert door.admit(wide, 1, 3, START + SECOND) is None


def test_a_refused_call_is_not_counted():
    door = AdmissionLimits(LimitsConfig(calls_open_max=5))
    call = make_call("a", key="k", limits=KeyLimits(concurrency=1))
    assert door.admit(call, 2, 3, START) is None
    assert door.admit(call, 2, 3, START).kind is RefusalKind.CONCURRENCY
    assert (door.calls_open, door.sequences_open, door._keys["k"].calls_open) == (1, 2, 1)
    door.release(call, 2, 10, START)
    assert (door.calls_open, door.sequences_open, door._keys["k"].calls_open) == (0, 0, 0)
    assert door.admit(call, 2, 3, START) is None


def test_beyond_the_bound_of_prompt_tokens_no_call_is_taken_until_one_ends():
    door = AdmissionLimits(LimitsConfig(calls_open_max=3))
    long, short = make_call("a", prompts=[[1] * 9000]), make_call("b")
    assert [door.admit(long, 1, 9000, START) for _ in range(2)] == [None, None]
    assert "18000 tokens are open" in door.admit(short, 1, 3, START).detail
    door.release(long, 1, 1, START)
    assert door.admit(short, 1, 3, START) is None


def test_keys_that_rest_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(limits, "KEYS_MAX", 3)
    door = AdmissionLimits(LimitsConfig())
    busy = make_call("busy", key="busy")
    door.admit(busy, 1, 1, START)
    for number in range(50):
        call = make_call(f"r{number}", key=f"k{number}", limits=KeyLimits(requests_per_minute=60))
        door.admit(call, 1, 1, START + number * MINUTE)
        door.release(call, 1, 1, START + number * MINUTE)
    assert len(door._keys) <= 4
    assert door._keys["busy"].calls_open == 1


def test_what_was_used_without_a_limit_is_not_owed_when_one_is_set():
    door = AdmissionLimits(LimitsConfig())
    free = make_call("a", key="k")
    for _ in range(100):
        assert door.admit(free, 1, 1000, START) is None
        door.release(free, 1, 1000, START)
    limited = make_call("b", key="k", limits=KeyLimits(requests_per_minute=1, tokens_per_minute=50))
    assert door.admit(limited, 1, 50, START) is None
    assert door.admit(limited, 1, 50, START) is not None


# The cluster.


def test_a_plan_of_an_older_epoch_is_ignored_unless_the_store_had_lost_its_plans():
    cluster = IngressClusterView()
    cluster.take_plan("m", plan(stage("s", 0, None, "a", "b"), epoch=5))
    cluster.take_plan("m", plan(stage("s", 0, None, "a"), epoch=4))
    assert [i.name for i in cluster.stages("m", 0)[0].instances] == ["a", "b"]
    assert cluster.why_unserved("m") == "a never heard of, b never heard of"
    assert cluster.why_unserved("other") == "no plan of it could be read"
    cluster.take_plan("m", None)
    assert [i.name for i in cluster.stages("m", 0)[0].instances] == ["a", "b"]
    cluster.take_plan("m", plan(stage("s", 0, None, "a"), epoch=1))
    assert [i.name for i in cluster.stages("m", 0)[0].instances] == ["a"]
    cluster.take_plan("m", plan(stage("s", 0, None, "b"), epoch=0))
    assert [i.name for i in cluster.stages("m", 0)[0].instances] == ["a"]
    cluster.reset_liveness(now_ns=1)
    cluster.take_plan("m", plan(stage("s", 0, None, "b"), epoch=0))
    assert [i.name for i in cluster.stages("m", 0)[0].instances] == ["b"], "the bus was away, and the store with it"
    cluster.check_invariants()


def test_instances_of_a_changed_plan_keep_what_is_known_of_them():
    cluster = IngressClusterView()
    cluster.take_summary(summary("b", START, running=2), START)
    cluster.take_plan("m", plan(stage("s", 0, None, "a"), epoch=1))
    assert cluster.usable("m") == 0
    cluster.take_plan("m", plan(stage("s", 0, None, "a", "b"), epoch=2))
    assert [c.running for c in cluster.stages("m", 0)[0].candidates()] == [2]
    cluster.check_invariants()


def test_a_draining_or_silent_instance_is_no_candidate_and_says_why():
    cluster = IngressClusterView()
    cluster.take_plan("m", plan(stage("s", 0, None, "a", "b", "c")))
    cluster.take_summary(summary("a", START, draining=True), START)
    cluster.take_summary(summary("b", START), START)
    cluster.take_summary(summary("a", START + SECOND, draining=True), START + SECOND)
    assert [i.name for i in cluster.expire(START + 2 * SECOND)] == ["b"]
    listed = cluster.stages("m", 0)[0]
    assert listed.candidates() == ()
    assert {s.name: s.note for s in listed.filtered()} == {
        "a": "draining",
        "b": "silent or dead",
        "c": "never heard of",
    }
    cluster.take_summary(summary("a", START + 2 * SECOND), START + 2 * SECOND)
    assert [c.name for c in listed.candidates()] == ["a"]
    cluster.check_invariants()


# Metrics.


@pytest.mark.parametrize("labels", [("a",), ("a", "b")])
def test_a_counter_holds_a_bounded_number_of_series(labels):
    counter = LabelledCounter(series_max=2)
    for number in range(10):
        counter.add(*(f"{label}{number}" for label in labels))
    assert len(counter.counts) <= 3
    assert counter.total() == 10
    assert counter.counts[("other",) * len(labels)] == 8


def sampled(tracer: Tracer, *, second: float, requests: int) -> int:
    return sum(tracer.begin(second).sampled for _ in range(requests))


def test_the_first_of_each_second_are_traced_and_a_share_of_the_rest() -> None:
    tracer = Tracer(Random(1), 0.1, 5)
    assert sampled(tracer, second=10.0, requests=5) == 5
    assert 60 <= sampled(tracer, second=10.9, requests=1000) <= 140
    assert sampled(tracer, second=11.0, requests=5) == 5


def test_a_share_alone_needs_no_clock() -> None:
    assert sampled(Tracer(Random(1), 1.0), second=0.0, requests=50) == 50
    assert sampled(Tracer(Random(1), 0.0), second=0.0, requests=50) == 0
