"""The worker as the target of a migration: reservations, pulls, sequences that arrive; and the evacuation before it
drains.
"""

from typing import Any

import msgspec
import pytest
from millrace.actor.effects import CancelTimer, Effect, Log, Publish, Reply, Request, StartTimer
from millrace.actor.engine import (
    AddToEngine,
    KvBlocksRead,
    KvRoomReserved,
    PullIntoEngine,
    ReserveInEngine,
    SequenceAdded,
    SequenceRejected,
    UnreserveInEngine,
)
from millrace.contracts.ingress import ReturnReason, SequencesReturned, TokenLogprobs, TokensResent
from millrace.contracts.kv import CopierKind, KvHandover, KvRefusal
from millrace.contracts.leases import KvPulled, MigrationPrepared, PrepareMigration, PullKv, UnreserveKv
from millrace.contracts.local import (
    BusDisconnected,
    BusReconnected,
    Replied,
    RequestFailed,
    RequestFailure,
    StopRequested,
    TimerFired,
)
from millrace.contracts.message import ErrorReply
from millrace.contracts.migration import EvacuateInstance, InstanceEvacuated, SequenceMoved
from millrace.contracts.status import InstanceSummary
from millrace.contracts.worker import (
    CancelSequence,
    DrainWorker,
    ResendTokens,
    Sampling,
    SequenceAccepted,
    SequenceRefused,
)

from services.worker.config import MigrationConfig
from services.worker.draining import LEFT_MS
from tests.unit.worker_rig import INFO, KV, MOVING, MS, Bench, bodies, chunks, denied, only, out, refusal

SOURCE = msgspec.structs.replace(KV, machine="elsewhere")


def bench(**options: Any) -> Bench:
    return Bench(**{"info": MOVING, **options})


def reserve(**fields: Any) -> PrepareMigration:
    about = {"migration": "m1", "sequence": "r1.0", "epoch": 3, "endpoint": SOURCE, "reserve_ms": 2000}
    return PrepareMigration(**{**about, "token_ids": list(range(40)), "blocks": 4, **fields})


def pull(from_block: int = 0, **fields: Any) -> PullKv:
    defaults: dict[str, Any] = {"migration": "m1", "blocks": [[7], [8]], "read_ms": 500, "checksums": [[70, 80]]}
    return PullKv(from_block=from_block, **{**defaults, **fields})


def room(migration: str = "m1") -> KvRoomReserved:
    return KvRoomReserved(migration=migration, matched_blocks=1, copier=CopierKind.MODELLED)


def read(from_block: int = 0) -> KvBlocksRead:
    copied = {"blocks": 2, "bytes": 2048, "descriptors": 1, "duration_ns": 9}
    return KvBlocksRead(migration="m1", from_block=from_block, copier=CopierKind.MODELLED, **copied)


HANDOVER = KvHandover(migration="m1", endpoint=SOURCE, from_block=2, blocks=[9], computed_tokens=41, read_ms=250)


def reserved(**options: Any) -> Bench:
    made = bench(**options)
    made.say(reserve(), reply_to="t")
    made.say(room())
    return made


def arriving(made: Bench, **fields: Any) -> list[Effect]:
    """The sequence comes, with four tokens that were decoded elsewhere."""
    defaults: dict[str, Any] = {"epoch": 3, "output_token_ids": [1, 2, 3, 4], "handover": HANDOVER}
    return made.submit(**{**defaults, **fields})


def arrived(made: Bench, **fields: Any) -> list[Effect]:
    arriving(made, **fields)
    return made.say(SequenceAdded(sequence="r1.0"))


def due(made: Bench, after_ms: float) -> list[Effect]:
    return made.say(TimerFired(name="reserve/m1"), after_ms=after_ms)


def test_a_reservation_is_asked_of_the_engine_and_answered_when_it_is_made() -> None:
    made = bench()
    asked = made.say(reserve(), reply_to="t")
    assert only(asked, ReserveInEngine) == [
        ReserveInEngine(migration="m1", sequence="r1.0", endpoint=SOURCE, token_ids=list(range(40)), blocks=4)
    ]
    assert only(asked, StartTimer) == [StartTimer(name="reserve/m1", at_ns=made.now + 2000 * MS)]
    assert not only(asked, Reply)
    (reply,) = only(made.say(room()), Reply)
    assert reply.body == MigrationPrepared(migration="m1", matched_blocks=1, copier=CopierKind.MODELLED, at_ns=made.now)
    assert reply.to == "t"


def test_a_repeated_reservation_gets_the_same_answer_and_is_made_once() -> None:
    made = bench()
    made.say(reserve(), reply_to="t1")
    assert not only(made.say(reserve(), reply_to="t2"), ReserveInEngine)
    assert [reply.to for reply in only(made.say(room()), Reply)] == ["t1", "t2"]
    again = made.say(reserve(), reply_to="t3")
    assert [reply.to for reply in only(again, Reply)] == ["t3"]
    assert not only(again, ReserveInEngine)
    assert refusal(made.say(reserve(sequence="r2.0"), reply_to="t")) is KvRefusal.INVALID


@pytest.mark.parametrize("fields", [{"blocks": 2}, {"token_ids": []}, {"token_ids": list(range(100)), "blocks": 9}])
def test_room_that_cannot_serve_is_not_reserved(fields: dict[str, Any]) -> None:
    effects = bench().say(reserve(**fields), reply_to="t")
    assert refusal(effects) is KvRefusal.INVALID
    assert not only(effects, ReserveInEngine)


def test_an_engine_that_moves_nothing_reserves_nothing() -> None:
    for options in ({"info": INFO}, {"migration": MigrationConfig(enabled=False)}):
        assert refusal(bench(**options).say(reserve(), reply_to="t")) is KvRefusal.UNABLE


def test_a_draining_a_full_or_a_later_worker_is_no_target() -> None:
    draining = bench()
    draining.running("other.0")
    draining.say(DrainWorker())
    full = bench(queue_max=0)
    full.running("a.0")
    full.running("b.0")
    later = bench()
    later.say(CancelSequence(sequence="r1.0", epoch=3))
    for made in (draining, full, later):
        assert refusal(made.say(reserve(), reply_to="t")) is KvRefusal.TARGET_REFUSED


def test_no_more_are_reserved_than_may() -> None:
    made = bench(migration=MigrationConfig(reservations_max=3))
    for index in range(3):
        made.say(reserve(migration=f"n{index}", sequence=f"q{index}.0"))
        made.say(room(f"n{index}"))
    assert refusal(made.say(reserve(), reply_to="t")) is KvRefusal.TOO_MANY
    made.say(UnreserveKv(migration="n1"))
    assert only(made.say(reserve(), reply_to="t"), ReserveInEngine)


def test_room_that_the_engine_denies_may_be_asked_for_again() -> None:
    made = bench()
    made.say(reserve(), reply_to="t")
    effects = made.say(denied(KvRefusal.NO_BLOCKS))
    assert refusal(effects) is KvRefusal.NO_BLOCKS
    assert only(effects, CancelTimer) == [CancelTimer(name="reserve/m1")]
    assert made.actor.snapshot()["reservations"] == {}
    assert only(made.say(reserve(), reply_to="t"), ReserveInEngine)


def test_a_reservation_without_news_ends_and_stays_over() -> None:
    made = reserved()
    assert not only(due(made, 1999), UnreserveInEngine)
    effects = due(made, 1)
    assert only(effects, UnreserveInEngine) == [UnreserveInEngine(migration="m1")]
    assert [log.event for log in only(effects, Log)] == ["reservation_expired"]
    assert made.actor.figures.reservations_expired == 1
    assert refusal(made.say(pull(), reply_to="t")) is KvRefusal.INVALID
    assert refusal(made.say(reserve(), reply_to="t")) is KvRefusal.CANCELLED


def test_an_engine_that_never_answers_keeps_no_room() -> None:
    made = bench()
    made.say(reserve(), reply_to="t")
    effects = due(made, 2000)
    assert only(effects, UnreserveInEngine)
    assert refusal(effects) is KvRefusal.CANCELLED
    assert made.say(room()) == []


def test_no_reservation_is_longer_than_allowed() -> None:
    made = bench(migration=MigrationConfig(reserve_ms_max=100))
    assert only(made.say(reserve(reserve_ms=10**9)), StartTimer)[0].at_ns == made.now + 100 * MS


def test_unreserving_frees_it_once_and_forever() -> None:
    made = reserved()
    effects = made.say(UnreserveKv(migration="m1"))
    assert only(effects, UnreserveInEngine) == [UnreserveInEngine(migration="m1")]
    assert made.say(UnreserveKv(migration="m1")) == made.say(UnreserveKv(migration="later")) == []
    for migration in ("m1", "later"):
        assert refusal(made.say(reserve(migration=migration), reply_to="t")) is KvRefusal.CANCELLED


def test_a_pull_reads_until_its_deadline_and_renews_the_reservation() -> None:
    made = reserved()
    effects = made.say(pull(), reply_to="t", after_ms=1500)
    assert only(effects, PullIntoEngine) == [
        PullIntoEngine(
            migration="m1", from_block=0, blocks=[[7], [8]], checksums=[[70, 80]], until_ns=made.now + 500 * MS
        )
    ]
    assert only(effects, StartTimer) == [StartTimer(name="reserve/m1", at_ns=made.now + 2000 * MS)]
    (body,) = bodies(made.say(read(), after_ms=300), KvPulled)
    assert (body.blocks, body.bytes, body.descriptors, body.copier) == (2, 2048, 1, CopierKind.MODELLED)
    assert not only(due(made, 1999), UnreserveInEngine)


def test_a_preparation_reads_its_first_blocks_but_for_those_that_the_cache_has() -> None:
    made = bench()
    body = reserve(pull=[[7], [8], [9]], checksums=[[70, 80, 90]], read_ms=500)
    assert not only(made.say(body, reply_to="t"), PullIntoEngine)
    effects = made.say(room(), after_ms=7)
    until_ns = made.now + 493 * MS
    assert only(effects, PullIntoEngine) == [
        PullIntoEngine(migration="m1", from_block=1, blocks=[[8], [9]], checksums=[[80, 90]], until_ns=until_ns)
    ]
    assert not only(effects, Reply)
    (answer,) = bodies(made.say(read(1), after_ms=20), MigrationPrepared)
    assert (answer.matched_blocks, answer.blocks, answer.bytes, answer.at_ns) == (1, 2, 2048, made.now)
    assert bodies(made.say(body, reply_to="t"), MigrationPrepared) == [answer], "a repeat reads nothing"


def test_a_preparation_whose_first_read_fails_keeps_no_room() -> None:
    made = bench()
    made.say(reserve(pull=[[7], [8]], read_ms=500), reply_to="t")
    made.say(room())
    effects = made.say(denied(KvRefusal.COPY_FAILED))
    assert refusal(effects) is KvRefusal.COPY_FAILED
    assert only(effects, UnreserveInEngine)
    assert made.actor.snapshot()["reservations"] == {}


def test_answers_of_the_target_show_its_clock() -> None:
    made = bench()
    made.say(reserve(), reply_to="t")
    assert bodies(made.say(room(), after_ms=7), MigrationPrepared)[0].at_ns == made.now
    made.say(pull(), reply_to="t", after_ms=3)
    shown = bodies(made.say(read(), after_ms=20), KvPulled)[0].at_ns
    assert shown == made.now
    assert bodies(made.say(pull(), reply_to="t", after_ms=40), KvPulled)[0].at_ns == shown, "an earlier one is early"
    assert bodies(made.say(pull(2, blocks=[], checksums=[[]]), reply_to="t"), KvPulled)[0].at_ns == made.now


def test_a_repeated_pull_gets_the_same_answer_and_is_read_once() -> None:
    made = reserved()
    made.say(pull(), reply_to="t1")
    assert not only(made.say(pull(), reply_to="t2"), PullIntoEngine)
    first = made.say(read())
    assert [reply.to for reply in only(first, Reply)] == ["t1", "t2"]
    again = made.say(pull(), reply_to="t3")
    assert bodies(again, KvPulled) == bodies(first, KvPulled)[:1]
    assert not only(again, PullIntoEngine)
    longer = made.say(pull(blocks=[[7], [8], [9]], checksums=[]), reply_to="t")
    assert only(longer, PullIntoEngine)[0].blocks == [[7], [8], [9]]


def test_a_pull_of_nothing_renews_and_asks_no_engine() -> None:
    made = reserved()
    effects = made.say(pull(2, blocks=[], checksums=[[]]), reply_to="t", after_ms=1500)
    assert bodies(effects, KvPulled)[0].blocks == 0
    assert not only(effects, PullIntoEngine)
    assert not only(due(made, 1000), UnreserveInEngine)


@pytest.mark.parametrize("fields", [{"from_block": -1}, {"checksums": [[70]]}, {"checksums": [[70, 80], []]}])
def test_a_pull_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    assert refusal(reserved().say(pull(**fields), reply_to="t")) is KvRefusal.INVALID


def test_a_failed_pull_leaves_the_reservation_and_may_be_repeated() -> None:
    made = reserved()
    made.say(pull(), reply_to="t")
    assert refusal(made.say(denied(KvRefusal.COPY_FAILED))) is KvRefusal.COPY_FAILED
    assert made.actor.figures.kv_refused == {KvRefusal.COPY_FAILED: 1}
    assert only(made.say(pull(), reply_to="t"), PullIntoEngine)
    assert bodies(made.say(read()), KvPulled)


def test_a_reservation_ends_under_a_read_only_at_the_reads_deadline() -> None:
    made = reserved()
    made.say(pull(read_ms=3000), reply_to="t")
    assert not only(due(made, 2000), UnreserveInEngine)
    effects = due(made, 2000)
    assert only(effects, UnreserveInEngine)
    assert refusal(effects) is KvRefusal.CANCELLED
    assert made.say(read()) == []


def test_a_sequence_that_arrives_goes_to_the_engine_with_its_kv_and_ingress_is_told() -> None:
    made = reserved()
    effects = arriving(made)
    (add,) = only(effects, AddToEngine)
    assert add.sequence.handover == HANDOVER
    assert add.sequence.output_token_ids == [1, 2, 3, 4]
    assert not bodies(effects, SequenceMoved)
    told = made.say(SequenceAdded(sequence="r1.0"))
    assert [type(effect).__name__ for effect in told] == ["Publish", "Reply"]
    (publish,) = only(told, Publish)
    assert publish.subject == "mr.t.moved.i0"
    assert publish.body == SequenceMoved(
        migration="m1", sequence="r1.0", epoch=3, instance="w0", incarnation=7, first_index=4
    )
    assert bodies(told, SequenceAccepted)
    figures = made.actor.figures
    assert (figures.accepted, figures.recomputes, figures.output_tokens) == (1, 0, 0)
    assert made.actor.snapshot()["reservations"] == {}


def test_what_it_brought_counts_as_sent_and_can_be_asked_for() -> None:
    made = reserved()
    assert not chunks(arrived(made))
    (chunk,) = chunks(made.step(out(5)))
    assert (chunk.first_index, chunk.token_ids, chunk.epoch) == (4, [5], 3)
    for index, tokens in ((0, [1, 2, 3, 4, 5]), (3, [4, 5])):
        (resent,) = bodies(
            made.say(ResendTokens(sequence="r1.0", epoch=3, from_index=index), reply_to="i"), TokensResent
        )
        assert (resent.chunk.first_index, resent.chunk.token_ids) == (index, tokens)


def test_with_log_probabilities_it_keeps_what_came_with_them() -> None:
    entries = [TokenLogprobs(token_ids=[token], logprobs=[-0.1], rank=1) for token in (3, 4, 5)]
    made = reserved()
    arrived(made, sampling=Sampling(max_tokens=10, logprobs=0), output_logprobs=entries[:2])
    made.step(out(5, logprobs=entries[2:]))
    (resent,) = bodies(made.say(ResendTokens(sequence="r1.0", epoch=3, from_index=2), reply_to="i"), TokensResent)
    assert (resent.chunk.token_ids, resent.chunk.logprobs) == ([3, 4, 5], entries)
    earlier = made.say(ResendTokens(sequence="r1.0", epoch=3, from_index=1), reply_to="i")
    assert bodies(earlier, TokensResent) == [resent]


def test_one_that_migrates_without_its_kv_is_computed_and_told_as_moved() -> None:
    made = bench(summary_interval_min_ms=0)
    effects = arriving(made, handover=None, migration="m1")
    (add,) = only(effects, AddToEngine)
    assert add.sequence.output_token_ids == [1, 2, 3, 4]
    (summary,) = bodies(effects, InstanceSummary)
    assert summary.waiting_prefill_tokens == 3 + 4
    (moved,) = bodies(made.say(SequenceAdded(sequence="r1.0")), SequenceMoved)
    assert (moved.migration, moved.first_index) == ("m1", 4)
    asked = made.say(ResendTokens(sequence="r1.0", epoch=3, from_index=1), reply_to="i")
    assert bodies(asked, TokensResent)[0].chunk.token_ids == [2, 3, 4]


@pytest.mark.parametrize("before", [lambda made: made.say(UnreserveKv(migration="m1")), lambda made: due(made, 2000)])
def test_without_its_reservation_a_sequence_is_computed_and_still_told_as_moved(before: Any) -> None:
    made = reserved()
    before(made)
    (add,) = only(arriving(made), AddToEngine)
    assert add.sequence.handover is None
    assert bodies(made.say(SequenceAdded(sequence="r1.0")), SequenceMoved)[0].first_index == 4
    assert made.actor.figures.recomputes == 1


def test_a_reservation_for_another_epoch_or_an_ungranted_one_is_not_claimed() -> None:
    other = reserved()
    assert only(arriving(other, epoch=4), AddToEngine)[0].sequence.handover is None
    pending = bench()
    pending.say(reserve(), reply_to="t")
    assert only(arriving(pending), AddToEngine)[0].sequence.handover is None


@pytest.mark.parametrize("ends", [arriving, lambda made: made.say(UnreserveKv(migration="m1"))])
def test_whoever_waits_for_a_read_is_refused_when_its_sequence_comes_or_its_room_is_given_up(ends: Any) -> None:
    made = reserved()
    made.say(pull(), reply_to="t")
    effects = ends(made)
    assert [add.sequence.handover for add in only(effects, AddToEngine)] == [HANDOVER] * (ends is arriving)
    assert refusal(effects) is KvRefusal.CANCELLED
    assert made.say(read()) == []


def test_a_repeated_arrival_is_answered_and_changes_nothing() -> None:
    made = reserved()
    arrived(made)
    again = arriving(made)
    assert bodies(again, SequenceAccepted)
    assert not only(again, AddToEngine)
    assert not bodies(again, SequenceMoved)


def test_a_draining_worker_refuses_an_arrival_and_the_room_waits_for_its_end() -> None:
    made = reserved()
    made.running("other.0")
    made.say(DrainWorker())
    assert bodies(arriving(made), SequenceRefused)
    assert only(made.say(UnreserveKv(migration="m1")), UnreserveInEngine)


def test_an_arrival_that_the_engine_rejects_is_refused_and_gone() -> None:
    made = reserved()
    arriving(made)
    effects = made.say(SequenceRejected(sequence="r1.0", detail="no"))
    assert bodies(effects, SequenceRefused)
    assert not bodies(effects, SequenceMoved)
    assert len(made.actor.ledger) == 0


def test_an_arrival_that_is_cancelled_before_the_engine_has_it_is_not_told() -> None:
    made = reserved()
    arriving(made)
    made.say(CancelSequence(sequence="r1.0", epoch=3))
    assert made.say(SequenceAdded(sequence="r1.0")) == []


def test_a_move_that_may_have_been_lost_with_the_bus_is_told_again() -> None:
    made = reserved()
    arrived(made)
    made.say(BusDisconnected())
    made.step(out(5))
    back = made.say(BusReconnected())
    assert bodies(back, SequenceMoved)[0].first_index == 4
    assert chunks(back)[0].first_index == 4
    for _ in range(3):
        made.step(out(6))
        made.tick()
    made.say(BusDisconnected())
    assert not bodies(made.say(BusReconnected()), SequenceMoved)


def test_a_moved_sequence_waits_with_nothing_to_compute() -> None:
    made = reserved(summary_interval_min_ms=0)
    (summary,) = bodies(arriving(made), InstanceSummary)
    assert (summary.waiting, summary.waiting_prefill_tokens) == (1, 1)


def test_times_of_a_moved_sequence_are_not_those_of_a_prompt() -> None:
    made = reserved()
    arrived(made)
    made.step(out(5, scheduled_ns=made.now))
    assert made.actor.figures.queue.count == 0


def draining(**options: Any) -> tuple[Bench, list[Effect]]:
    made = bench(**options)
    made.running()
    return made, made.say(DrainWorker(limit_ms=4000))


def test_a_worker_that_stops_has_its_migrator_move_everything_away_and_asks_once() -> None:
    made = bench(drain_limit_ms=7000)
    made.running()
    (request,) = only(made.say(StopRequested()), Request)
    assert request.subject == "mr.t.migrate.w0.evacuate"
    assert request.timeout_ns >= 7000 * MS
    assert request.body == EvacuateInstance(limit_ms=7000 - LEFT_MS)
    assert not only(made.say(DrainWorker(limit_ms=10)), Request)


@pytest.mark.parametrize("options", [{"info": INFO}, {"migration": MigrationConfig(enabled=False)}])
def test_a_worker_that_moves_nothing_asks_nobody(options: dict[str, Any]) -> None:
    assert not only(draining(**options)[1], Request)


def test_an_empty_worker_or_one_without_a_bus_asks_nobody() -> None:
    empty = bench()
    assert not only(empty.say(DrainWorker()), Request)
    cut = bench()
    cut.running()
    cut.say(BusDisconnected())
    assert not only(cut.say(DrainWorker(limit_ms=5000)), Request)
    (request,) = only(cut.say(BusReconnected(), after_ms=2000), Request)
    assert request.body == EvacuateInstance(limit_ms=3000 - LEFT_MS)
    assert not only(cut.say(BusReconnected()), Request)


@pytest.mark.parametrize(
    "answer",
    [
        Replied(correlation="evacuate", body=InstanceEvacuated(instance="w0", moved=0, failed=2, left=1)),
        Replied(correlation="evacuate", body=ErrorReply(reason="overloaded")),
        RequestFailed(correlation="evacuate", reason=RequestFailure.NO_RESPONDERS),
        RequestFailed(correlation="evacuate", reason=RequestFailure.TIMEOUT),
    ],
)
def test_however_the_evacuation_ends_what_is_left_is_handed_back_at_the_limit(answer: Any) -> None:
    made, _ = draining()
    assert [type(effect) for effect in made.say(answer, after_ms=100)] == [Log]
    assert made.actor.ledger.live == 1
    (returned,) = bodies(made.say(TimerFired(name="drain"), after_ms=3900), SequencesReturned)
    assert (returned.reason, returned.sequences) == (ReturnReason.DRAINING, [("r1.0", 0)])
