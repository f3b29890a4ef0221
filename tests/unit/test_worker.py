"""The worker actor: messages in, effects out."""

import itertools
from typing import Any

import msgspec
import pytest
from millrace.actor.effects import DeleteKey, Publish, PutKey, RecordSpan, Reply, StartTimer, Stop, Subscribe
from millrace.actor.engine import (
    AddToEngine,
    CancelInEngine,
    EngineFailed,
    EngineLiveness,
    EngineObserved,
    EngineStepped,
    SequenceAdded,
    SequenceRejected,
)
from millrace.contracts.codec import PAYLOAD_BYTES_MAX, encode
from millrace.contracts.ingress import (
    EngineTimes,
    FinishReason,
    ReturnReason,
    SequencesReturned,
    TokenLogprobs,
    TokensGenerated,
)
from millrace.contracts.local import BusDisconnected, BusReconnected, StopRequested, TimerFired
from millrace.contracts.message import ErrorReply
from millrace.contracts.status import (
    InstanceSummary,
    PresenceState,
    SequenceState,
    SequenceStatus,
    ServicePresence,
    StatusSnapshot,
)
from millrace.contracts.worker import (
    AcknowledgeSequences,
    CancelSequence,
    DrainWorker,
    Pooling,
    RefusalReason,
    ResendTokens,
    ReturnSequences,
    Sampling,
    SequenceAccepted,
    SequenceRefused,
)

from tests.unit.worker_rig import MS, START, TRACE, Bench, bodies, chunks, only, out, snapshot, submit


def test_start_subscribes_the_inbox_registers_and_says_it_is_alive() -> None:
    bench = Bench()
    assert {e.subject for e in only(bench.first, Subscribe)} == {
        "mr.t.engine.w0.*",
        "mr.t.presence.ingress.*",
        "mr.t.bid.*.w0",
    }
    (put,) = only(bench.first, PutKey)
    assert (put.bucket, put.key, put.value.blocks_total) == ("instance", "w0", 32)
    assert bodies(bench.first, ServicePresence)[0].state is PresenceState.ALIVE
    assert bodies(bench.first, InstanceSummary)
    assert bodies(bench.first, StatusSnapshot)
    assert {t.name for t in only(bench.first, StartTimer)} == {"tick", "register", "report"}


def test_a_submit_goes_to_the_engine_and_is_answered_once_the_engine_has_it() -> None:
    bench = Bench()
    effects = bench.submit(output_token_ids=[9], sampling=Sampling(max_tokens=4, seed=3))
    (add,) = only(effects, AddToEngine)
    assert add.sequence.output_token_ids == [9]
    assert add.sequence.sampling.seed == 3
    assert not only(effects, Reply)
    (reply,) = only(bench.say(SequenceAdded(sequence="r1.0")), Reply)
    assert reply == Reply(to="inbox", body=SequenceAccepted(sequence="r1.0", epoch=0), request="r1")


def test_the_same_submit_again_is_answered_and_not_added_again() -> None:
    bench = Bench()
    bench.submit()
    waiting = bench.say(submit(), reply_to="second")
    assert not only(waiting, AddToEngine)
    replies = only(bench.say(SequenceAdded(sequence="r1.0")), Reply)
    assert [r.to for r in replies] == ["inbox", "second"]
    again = bench.say(submit(), reply_to="third")
    assert [r.to for r in only(again, Reply)] == ["third"]
    assert not only(again, AddToEngine)


def test_an_older_epoch_is_refused_and_a_newer_one_replaces() -> None:
    bench = Bench()
    bench.running(epoch=2)
    assert bodies(bench.submit(epoch=1), SequenceRefused)[0].reason is RefusalReason.STALE_EPOCH
    newer = bench.submit(epoch=3, output_token_ids=[4])
    assert [type(e) for e in newer[:2]] == [CancelInEngine, AddToEngine]
    bench.say(SequenceAdded(sequence="r1.0"))
    assert chunks(bench.step(out(8)))[0].epoch == 3


def test_a_cancelled_or_acknowledged_epoch_is_never_taken_again() -> None:
    bench = Bench()
    bench.running()
    bench.say(CancelSequence(sequence="r1.0", epoch=0))
    assert bodies(bench.submit(), SequenceRefused)[0].reason is RefusalReason.STALE_EPOCH
    bench.running("r2.0")
    bench.step(out(1, sequence="r2.0", finish=FinishReason.STOP))
    bench.say(AcknowledgeSequences(sequences=[("r2.0", 0)]))
    assert bodies(bench.submit("r2.0"), SequenceRefused)[0].reason is RefusalReason.STALE_EPOCH


def test_a_cancel_that_overtakes_its_submit_still_holds() -> None:
    bench = Bench()
    assert bench.say(CancelSequence(sequence="r1.0", epoch=0)) == []
    assert bodies(bench.submit(), SequenceRefused)[0].reason is RefusalReason.STALE_EPOCH
    assert only(bench.submit(epoch=1), AddToEngine)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_token_ids": [1] * 100}, RefusalReason.TOO_LONG),
        ({"prompt_token_ids": [1] * 60, "output_token_ids": [1] * 40}, RefusalReason.TOO_LONG),
        ({"prompt_token_ids": []}, RefusalReason.INVALID),
        ({"epoch": -1}, RefusalReason.INVALID),
        ({"ingress": ""}, RefusalReason.INVALID),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(fields: dict[str, Any], reason: RefusalReason) -> None:
    effects = Bench().submit(**fields)
    assert bodies(effects, SequenceRefused)[0].reason is reason
    assert not only(effects, AddToEngine)


def test_the_queue_is_bounded_and_room_comes_back() -> None:
    bench = Bench(queue_max=1)
    for index in range(3):
        bench.running(f"r{index}.0")
    assert bodies(bench.submit("r9.0"), SequenceRefused)[0].reason is RefusalReason.FULL
    bench.step(out(1, sequence="r0.0", finish=FinishReason.STOP))
    assert only(bench.submit("r9.0"), AddToEngine)


def test_the_engines_refusal_reaches_the_asker_and_the_epoch_may_come_again() -> None:
    bench = Bench()
    bench.submit()
    effects = bench.say(SequenceRejected(sequence="r1.0", detail="top_p must be in (0, 1]"))
    (refused,) = bodies(effects, SequenceRefused)
    assert (refused.reason, refused.detail) == (RefusalReason.INVALID, "top_p must be in (0, 1]")
    assert bench.actor.snapshot()["live"] == 0
    assert only(bench.submit(), AddToEngine)


def test_a_continuation_that_already_has_all_its_tokens_ends_at_once() -> None:
    bench = Bench()
    effects = bench.submit(epoch=1, sampling=Sampling(max_tokens=2), output_token_ids=[4, 5])
    assert not only(effects, AddToEngine)
    assert bodies(effects, SequenceAccepted)
    (chunk,) = chunks(effects)
    assert (chunk.first_index, chunk.token_ids, chunk.finish) == (2, [], FinishReason.LENGTH)


def test_one_message_per_step_and_ingress_with_numbered_chunks() -> None:
    bench = Bench()
    bench.running("a.0", output_token_ids=[7, 7], epoch=1)
    bench.running("b.0")
    bench.running("c.0", ingress="i1")
    effects = bench.step(out(1, sequence="a.0"), out(2, sequence="b.0"), out(3, sequence="c.0"), number=5)
    messages = [e for e in only(effects, Publish) if isinstance(e.body, TokensGenerated)]
    assert [m.subject for m in messages] == ["mr.t.tokens.i0", "mr.t.tokens.i1"]
    assert [m.body.step for m in messages] == [5, 5]
    assert [(c.sequence, c.epoch, c.first_index, c.token_ids) for c in messages[0].body.chunks] == [
        ("a.0", 1, 2, [1]),
        ("b.0", 0, 0, [2]),
    ]
    after = chunks(bench.step(out(4, sequence="a.0")))
    assert [(c.first_index, c.token_ids) for c in after] == [(3, [4])]


def test_cached_tokens_go_with_the_first_chunk_only_and_logprobs_with_theirs() -> None:
    bench = Bench()
    bench.running(sampling=Sampling(max_tokens=9, logprobs=1))
    entry = TokenLogprobs([5, 6], [-0.1, -2.0], 1)
    first = chunks(bench.step(out(5, cached_tokens=2, logprobs=[entry])))[0]
    second = chunks(bench.step(out(6, logprobs=[entry])))[0]
    assert (first.cached_tokens, second.cached_tokens) == (2, None)
    assert second.logprobs == [entry]


def test_resend_gives_everything_from_the_index_on() -> None:
    bench = Bench()
    bench.running(epoch=1, output_token_ids=[9, 9])
    bench.step(out(1))
    bench.step(out(2))
    bench.step(out(3, finish=FinishReason.STOP))
    for index, first, tokens in ((3, 3, [2, 3]), (0, 2, [1, 2, 3])):  # what another instance decoded is not held
        (reply,) = only(bench.say(ResendTokens(sequence="r1.0", epoch=1, from_index=index), reply_to="x"), Reply)
        chunk = reply.body.chunk
        assert (chunk.first_index, chunk.token_ids, chunk.finish) == (first, tokens, FinishReason.STOP)


@pytest.mark.parametrize(
    "body",
    [ResendTokens(sequence="nobody.0", epoch=0, from_index=0), ResendTokens(sequence="r1.0", epoch=0, from_index=2)],
)
def test_resend_of_what_is_not_held_says_so(body: ResendTokens) -> None:
    bench = Bench()
    bench.running(epoch=1, output_token_ids=[9, 9])
    assert bodies(bench.say(body, reply_to="x"), ErrorReply)


def test_acknowledged_sequences_are_dropped_and_live_ones_are_not() -> None:
    bench = Bench()
    bench.running("a.0")
    bench.running("b.0")
    bench.step(out(1, sequence="a.0", finish=FinishReason.STOP))
    bench.say(AcknowledgeSequences(sequences=[("a.0", 0), ("b.0", 0), ("c.0", 0)]))
    assert set(bench.actor.snapshot()["sequences"]) == {"b.0"}


def test_unacknowledged_sequences_are_forgotten_after_a_time_and_beyond_a_number() -> None:
    bench = Bench(finished_ttl_ms=2500, finished_max=2)
    for index in range(4):
        bench.running(f"r{index}.0")
        bench.step(out(1, sequence=f"r{index}.0", finish=FinishReason.STOP))
    bench.say(ServicePresence(role="ingress", name="i0", incarnation=5, at_ns=bench.now))
    bench.tick()
    assert set(bench.actor.snapshot()["sequences"]) == {"r2.0", "r3.0"}
    bench.tick(2)
    assert bench.actor.snapshot()["held"] == 0
    assert bench.actor.ledger.forgotten == 4


def test_cancel_takes_the_sequence_out_of_the_engine() -> None:
    bench = Bench()
    bench.running(epoch=2)
    assert only(bench.say(CancelSequence(sequence="r1.0", epoch=1)), CancelInEngine) == []
    effects = bench.say(CancelSequence(sequence="r1.0", epoch=2))
    assert only(effects, CancelInEngine) == [CancelInEngine(sequences=["r1.0"])]
    assert not chunks(bench.step(out(1)))


def test_a_restarted_ingress_leaves_orphans_that_are_cancelled() -> None:
    bench = Bench()
    bench.running("old.0", ingress_incarnation=5)
    bench.running("other.0", ingress="i1")
    effects = bench.say(ServicePresence(role="ingress", name="i0", incarnation=6, at_ns=bench.now))
    assert only(effects, CancelInEngine) == [CancelInEngine(sequences=["old.0"])]
    late = bench.submit("late.0", ingress_incarnation=5)
    assert bodies(late, SequenceRefused)[0].reason is RefusalReason.STALE_EPOCH
    assert only(bench.submit("new.0", ingress_incarnation=6), AddToEngine)


@pytest.mark.parametrize(("incarnation", "died"), [(0, True), (5, True), (4, False)])
def test_a_dead_ingress_leaves_orphans_that_are_cancelled_and_an_earlier_one_none(incarnation: int, died: bool) -> None:
    bench = Bench()
    bench.running(ingress_incarnation=5)
    told = {"role": "ingress", "name": "i0", "incarnation": incarnation, "at_ns": bench.now}
    effects = bench.say(ServicePresence(state=PresenceState.DEAD, **told))
    assert bool(only(effects, CancelInEngine)) is died
    assert bench.actor.figures.orphans == died


def test_a_silent_ingress_loses_its_sequences_once_and_none_while_the_bus_is_away_or_the_worker_stands_still() -> None:
    bench = Bench(ingress_silence_ms=5000)
    bench.running()
    assert not only(bench.tick(4), CancelInEngine)
    bench.say(BusDisconnected())
    assert not only(bench.tick(10), CancelInEngine)
    bench.say(BusReconnected())
    assert not only(bench.tick(3), CancelInEngine)
    assert not only(bench.say(TimerFired(name="tick"), after_ms=9000), CancelInEngine), "this worker stood still"
    assert only(bench.tick(4), CancelInEngine)
    for number in range(3):  # it was heard again, so it had only stood still
        bench.running(f"again{number}.0")
        assert not only(bench.tick(8), CancelInEngine)


def test_a_sequence_past_its_deadline_ends() -> None:
    bench = Bench()
    bench.running(deadline_ns=START + 1500 * MS)
    assert not only(bench.tick(), CancelInEngine)
    effects = bench.tick()
    assert only(effects, CancelInEngine)
    assert chunks(effects)[0].finish is FinishReason.CANCELLED


def test_status_and_summary_keep_their_least_intervals() -> None:
    bench = Bench(status_interval_min_ms=10, summary_interval_min_ms=25)
    bench.running()
    seen: list[tuple[int, str]] = []
    for index in range(60):
        effects = bench.say(
            EngineStepped(step=index, at_ns=bench.now, outputs=[], snapshot=snapshot(bench.now, step=index)), after_ms=1
        )
        seen += [(bench.now, type(b).__name__) for b in bodies(effects, StatusSnapshot | InstanceSummary)]
    for kind, least in (("StatusSnapshot", 10), ("InstanceSummary", 25)):
        times = [at for at, name in seen if name == kind]
        assert len(times) >= 2
        assert all(b - a >= least * MS for a, b in itertools.pairwise(times))


def test_an_idle_worker_reports_at_least_every_250_ms() -> None:
    bench = Bench()
    times = {"StatusSnapshot": [bench.now], "InstanceSummary": [bench.now]}
    due = max(t.at_ns for t in only(bench.first, StartTimer) if t.name == "report")
    for _ in range(20):
        bench.now = due
        effects = bench.say(TimerFired(name="report"))
        for body in bodies(effects, StatusSnapshot | InstanceSummary):
            times[type(body).__name__].append(bench.now)
        (timer,) = only(effects, StartTimer)
        due = timer.at_ns + 5 * MS  # timers are late
    for moments in times.values():
        assert all(b - a <= 250 * MS for a, b in itertools.pairwise(moments))


def test_a_sequence_the_snapshot_cannot_know_yet_counts_as_waiting() -> None:
    bench = Bench(summary_interval_min_ms=0)
    (summary,) = bodies(bench.submit(), InstanceSummary)
    assert (summary.waiting, summary.waiting_prefill_tokens) == (1, 3)
    bench.now += 10 * MS
    observed = bench.say(EngineObserved(snapshot=snapshot(bench.now, running=1)))
    (summary,) = bodies(observed, InstanceSummary)
    assert (summary.running, summary.waiting, summary.blocks_free) == (1, 0, 31)


def test_summaries_tell_how_long_a_hung_engine_is_silent_and_how_long_steps_take() -> None:
    bench = Bench(summary_interval_min_ms=0)
    (summary,) = bodies(bench.submit(), InstanceSummary)
    assert (summary.engine_silent_ns, summary.step_age_ns, summary.step_longest_ns) == (0, 0, 0)
    began = bench.now
    slow = msgspec.structs.replace(snapshot(bench.now, running=1), step_duration_ns=40 * MS)
    bench.say(EngineObserved(snapshot=slow))
    bench.now += 300 * MS
    (summary,) = bodies(bench.say(EngineLiveness(silent_since_ns=began, step_since_ns=began + MS)), InstanceSummary)
    assert (summary.engine_silent_ns, summary.step_age_ns) == (300 * MS, 299 * MS)
    assert summary.step_longest_ns == 40 * MS
    bench.now += 100 * MS
    (summary,) = bodies(bench.say(EngineLiveness(silent_since_ns=0, step_since_ns=0)), InstanceSummary)
    assert (summary.engine_silent_ns, summary.step_age_ns) == (0, 0)
    bench.now += 61_000 * MS
    bench.say(EngineObserved(snapshot=snapshot(bench.now, running=1)))
    (summary,) = bodies(bench.say(EngineLiveness(silent_since_ns=0, step_since_ns=0)), InstanceSummary)
    assert summary.step_longest_ns < 40 * MS, "a minute later it is forgotten"


def test_while_the_bus_is_down_nothing_is_published_and_all_is_said_after() -> None:
    bench = Bench()
    bench.running()
    bench.step(out(1))
    bench.tick(2)
    bench.step(out(2))
    bench.say(BusDisconnected())
    quiet = bench.step(out(3)) + bench.tick() + bench.step(out(4, finish=FinishReason.STOP))
    assert not only(quiet, Publish)
    assert not only(quiet, PutKey)
    effects = bench.say(BusReconnected())
    (chunk,) = chunks(effects)
    # Token 2 was sent just before the outage and may be lost; token 1 is two ticks old and is not repeated.
    assert (chunk.first_index, chunk.token_ids, chunk.finish) == (1, [2, 3, 4], FinishReason.STOP)
    assert only(effects, PutKey)


def test_an_end_that_nobody_acknowledges_is_said_again_until_somebody_does() -> None:
    bench = Bench()
    bench.running()
    bench.step(out(1, 2, finish=FinishReason.STOP))
    assert not chunks(bench.say(TimerFired(name="tick"), after_ms=500))
    for _ in range(3):
        (chunk,) = chunks(bench.tick())
        assert (chunk.first_index, chunk.token_ids, chunk.finish) == (2, [], FinishReason.STOP)
    bench.say(AcknowledgeSequences(sequences=[("r1.0", 0)]))
    assert not chunks(bench.tick())


def test_repeats_come_in_messages_of_bounded_size() -> None:
    bench = Bench(queue_max=100)
    for index in range(80):
        bench.running(f"r{index}.0")
    bench.say(BusDisconnected())
    for index in range(80):
        bench.step(out(1, sequence=f"r{index}.0"))
    sizes = [len(body.chunks) for body in bodies(bench.say(BusReconnected()), TokensGenerated)]
    assert sizes == [32, 32, 16]


def test_a_pooled_output_goes_out_in_pieces_in_messages_of_bounded_size() -> None:
    bench = Bench()
    pooling = Sampling(max_tokens=32, pooling=Pooling(task="token_embed"))
    bench.running(sampling=pooling, prompt_token_ids=list(range(100)))  # as long as the model takes
    bench.running("r2.0", sampling=pooling)
    parts = [bytes([n]) * 250_000 for n in range(3)]
    done = {"pooled": parts, "finish": FinishReason.STOP}
    effects = bench.step(out(0, 1, 2, **done), out(0, 1, 2, sequence="r2.0", **done))
    told = bodies(effects, TokensGenerated)
    assert [len(body.chunks) for body in told] == [2, 2, 2]
    assert all(len(encode(body)) < PAYLOAD_BYTES_MAX for body in told)
    of_first = [chunk for body in told for chunk in body.chunks if chunk.sequence == "r1.0"]
    assert sorted((c.first_index, c.token_ids, c.pooled, c.finish) for c in of_first) == [
        (0, [0], [parts[0]], None),
        (1, [1], [parts[1]], None),
        (2, [2], [parts[2]], FinishReason.STOP),
    ]
    (reply,) = only(bench.say(ResendTokens(sequence="r1.0", epoch=0, from_index=1), reply_to="x"), Reply)
    assert (reply.body.chunk.token_ids, reply.body.chunk.pooled) == ([1], [parts[1]])


def test_stop_without_work_leaves_at_once() -> None:
    effects = Bench().say(StopRequested())
    assert [type(e) for e in effects[-3:]] == [Publish, DeleteKey, Stop]
    assert bodies(effects, ServicePresence)[-1].state is PresenceState.LEAVING


def test_drain_lets_work_finish_refuses_new_and_lingers_for_unacknowledged_tokens() -> None:
    bench = Bench(linger_ms=1000)
    bench.running()
    effects = bench.say(DrainWorker(limit_ms=5000))
    assert bodies(effects, InstanceSummary)[0].draining
    assert bodies(bench.submit("r2.0"), SequenceRefused)[0].reason is RefusalReason.DRAINING
    done = bench.step(out(1, finish=FinishReason.STOP))
    assert not only(done, Stop)
    assert only(done, StartTimer)[0].name == "linger"
    assert only(bench.say(AcknowledgeSequences(sequences=[("r1.0", 0)])), Stop)


def test_a_drained_worker_leaves_after_the_linger_time() -> None:
    bench = Bench()
    bench.running()
    bench.say(StopRequested())
    bench.step(out(1, finish=FinishReason.STOP))
    assert only(bench.say(TimerFired(name="linger"), after_ms=1000), Stop)


def test_at_the_drain_limit_the_rest_is_handed_back() -> None:
    bench = Bench(drain_limit_ms=3000)
    bench.running("a.0", epoch=2)
    bench.running("b.0", ingress="i1")
    bench.say(StopRequested())
    assert not only(bench.say(TimerFired(name="drain"), after_ms=1000), Stop)
    effects = bench.say(TimerFired(name="drain"), after_ms=2000)
    returned = bodies(effects, SequencesReturned)
    assert [(r.reason, r.sequences) for r in returned] == [
        (ReturnReason.DRAINING, [("a.0", 2)]),
        (ReturnReason.DRAINING, [("b.0", 0)]),
    ]
    assert sorted(only(effects, CancelInEngine)[0].sequences) == ["a.0", "b.0"]
    assert isinstance(effects[-1], Stop)


def test_a_later_stop_shortens_a_drain_and_never_lengthens_it() -> None:
    bench = Bench(drain_limit_ms=1000)
    bench.running()
    bench.say(DrainWorker(limit_ms=60_000))
    assert only(bench.say(StopRequested()), StartTimer)[0].at_ns == bench.now + 1000 * MS
    assert bench.say(DrainWorker(limit_ms=60_000)) == []


def queued(bench: Bench, *waiting: SequenceStatus) -> None:
    """The engine shows these in its queue."""
    bench.say(EngineObserved(snapshot=msgspec.structs.replace(snapshot(bench.now), waiting=list(waiting))))


def test_what_waits_without_kv_is_handed_back_when_its_broker_asks() -> None:
    bench = Bench()
    for name in ("a.0", "b.0", "c.0"):
        bench.running(name, epoch=2)
    waiting = SequenceStatus("a.0", SequenceState.WAITING, 10, 0, 0, 20, 0, bench.now)
    preempted = msgspec.structs.replace(waiting, sequence="b.0", state=SequenceState.PREEMPTED, output_tokens=4)
    holding = msgspec.structs.replace(waiting, sequence="c.0", blocks=1)
    queued(bench, waiting, preempted, holding)
    effects = bench.say(ReturnSequences(sequences=["a.0", "b.0", "c.0", "unknown.0"]))
    (returned,) = bodies(effects, SequencesReturned)
    assert (returned.reason, returned.sequences) == (ReturnReason.REQUESTED, [("a.0", 2), ("b.0", 2)])
    (cancel,) = only(effects, CancelInEngine)
    assert cancel.sequences == ["a.0", "b.0"]
    again = bench.say(ReturnSequences(sequences=["a.0", "b.0"]))
    assert again == [], "repeated, it changes nothing"
    assert bodies(bench.submit("a.0", epoch=2), SequenceRefused)[0].reason is RefusalReason.STALE_EPOCH


def test_nothing_is_handed_back_while_the_bus_is_away() -> None:
    bench = Bench()
    bench.running("a.0")
    queued(bench, SequenceStatus("a.0", SequenceState.WAITING, 10, 0, 0, 20, 0, bench.now))
    bench.say(BusDisconnected())
    assert bench.say(ReturnSequences(sequences=["a.0"])) == []


def test_a_dead_engine_hands_everything_back_and_stops() -> None:
    bench = Bench()
    bench.running("a.0")
    bench.submit("b.0")
    effects = bench.say(EngineFailed(detail="killed by signal 9"))
    (returned,) = bodies(effects, SequencesReturned)
    assert (returned.reason, returned.sequences) == (ReturnReason.ENGINE_DIED, [("a.0", 0), ("b.0", 0)])
    (stop,) = only(effects, Stop)
    assert "killed by signal 9" in stop.reason
    assert bodies(bench.say(submit("c.0"), reply_to="x"), ErrorReply)


def test_spans_of_a_sampled_sequence_cover_queue_prefill_and_decode() -> None:
    bench = Bench()
    bench.running(traceparent=TRACE)
    received = START
    bench.step(out(1, scheduled_ns=received + 2 * MS, cached_tokens=1), after_ms=5)
    effects = bench.step(out(2, finish=FinishReason.STOP, preemptions=1), after_ms=7)
    spans = only(effects, RecordSpan)
    assert [s.name for s in spans] == ["queue", "prefill", "decode"]
    assert [(s.start_ns - received) // MS for s in spans] == [0, 2, 5]
    assert [(s.end_ns - received) // MS for s in spans] == [2, 5, 12]
    assert {s.parent_span_id for s in spans} == {"b7ad6b7169203331"}
    assert {s.traceparent[:35] for s in spans} == {TRACE[:35]}
    assert len({s.traceparent for s in spans}) == 3
    assert spans[-1].attributes["millrace.output_tokens"] == 2
    assert spans[-1].attributes["millrace.cached_tokens"] == 1
    assert spans[-1].attributes["millrace.preemptions"] == 1
    assert [s.error for s in spans] == ["", "", ""]
    (told,) = bodies(effects, TokensGenerated)
    assert told.chunks[0].times == EngineTimes(2 * MS, 3 * MS, 10 * MS, 1)


def test_a_cancelled_sequence_has_the_spans_it_reached_and_says_why() -> None:
    bench = Bench()
    bench.running(traceparent=TRACE)
    spans = only(bench.say(CancelSequence(sequence="r1.0", epoch=0, reason="client gone"), after_ms=3), RecordSpan)
    assert [(s.name, s.error) for s in spans] == [("queue", "cancelled: client gone")]


@pytest.mark.parametrize("traceparent", ["", TRACE[:-1] + "0", "rubbish", "00-" + "z" * 49 + "-zz"])
def test_without_a_sampled_trace_there_are_no_spans(traceparent: str) -> None:
    bench = Bench()
    bench.running(traceparent=traceparent)
    assert not only(bench.step(out(1, finish=FinishReason.STOP)), RecordSpan)
