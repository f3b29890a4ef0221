"""The worker as the source of a migration: leases, freezes, and what becomes of them when anything goes wrong."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from millrace.actor.effects import CancelTimer, Effect, Log, PutKey, RecordSpan, Reply, StartTimer
from millrace.actor.engine import (
    AddToEngine,
    CancelInEngine,
    EndLeaseInEngine,
    EngineObserved,
    FreezeInEngine,
    KvLeaseTaken,
    LeaseInEngine,
    SequenceAdded,
    SequenceStopped,
)
from millrace.contracts.ingress import FinishReason, TokenLogprobs
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import EndLease, FreezeSequence, KvLeased, LeaseKv, SequenceFrozen
from millrace.contracts.local import TimerFired
from millrace.contracts.message import ErrorReply
from millrace.contracts.status import EngineDescription, PresenceState, SequenceState, SequenceStatus, ServicePresence
from millrace.contracts.worker import (
    CancelSequence,
    DrainWorker,
    RefusalReason,
    ResendTokens,
    ReturnSequences,
    Sampling,
    SequenceRefused,
)

from services.worker.config import MigrationConfig
from tests.unit.worker_rig import (
    INFO,
    KV,
    MOVING,
    MS,
    NO_CHANGES,
    TRACE,
    Bench,
    bodies,
    chunks,
    denied,
    only,
    out,
    refusal,
    snapshot,
    submit,
)

TOLD = msgspec.structs.replace(KV, freeze_ms_max=MigrationConfig().freeze_ms_max)
NAMES = ["r1.0", "r2.0", "r3.0"]


def bench(info: EngineDescription = MOVING, migration: MigrationConfig = NO_CHANGES, **fields: Any) -> Bench:
    """One running sequence with three tokens, at an instance that moves. ``fields``: of its submission."""
    made = Bench(info, migration)
    made.running(**fields)
    made.step(out(1, 2, 3))
    return made


ABOUT = {"migration": "m1", "sequence": "r1.0", "epoch": 0}


def lease(sequence: str = "r1.0", **fields: Any) -> LeaseKv:
    return LeaseKv(**{**ABOUT, "sequence": sequence, "from_block": 0, "lease_ms": 2000, **fields})


def freeze(**fields: Any) -> FreezeSequence:
    return FreezeSequence(**{**ABOUT, "from_block": 1, "freeze_ms": 250, **fields})


def end(*, moved: bool, **fields: Any) -> EndLease:
    return EndLease(moved=moved, **{**ABOUT, **fields})


def taken(migration: str = "m1", sequence: str = "r1.0", from_block: int = 0) -> KvLeaseTaken:
    kv = {"from_block": from_block, "blocks": [[5], [6]], "checksums": [[50, 60]]}
    tokens = {"prompt_tokens": 3, "output_tokens": 3, "computed_tokens": 5}
    return KvLeaseTaken(migration=migration, sequence=sequence, **kv, **tokens)


def stopped(*tokens: int) -> SequenceStopped:
    kv = {"from_block": 1, "blocks": [[6], [7]], "checksums": [[60, 70]], "computed_tokens": 5}
    return SequenceStopped(migration="m1", sequence="r1.0", output_token_ids=list(tokens), frozen_ns=77, **kv)


def leased(made: Bench | None = None, **options: Any) -> Bench:
    """A sequence under lease m1."""
    made = made or bench(**options)
    made.say(lease(), reply_to="s")
    made.say(taken())
    return made


def frozen(made: Bench | None = None, **options: Any) -> Bench:
    """A sequence that stands still under lease m1."""
    made = leased(made, **options)
    made.say(freeze(), reply_to="s")
    made.say(stopped(1, 2, 3))
    return made


def due(bench: Bench, after_ms: float) -> list[Effect]:
    return bench.say(TimerFired(name="lease/m1"), after_ms=after_ms)


def test_a_lease_is_asked_of_the_engine_and_answered_when_it_is_taken() -> None:
    made = bench()
    asked = made.say(lease(), reply_to="s")
    assert only(asked, LeaseInEngine) == [LeaseInEngine(migration="m1", sequence="r1.0", from_block=0)]
    assert only(asked, StartTimer) == [StartTimer(name="lease/m1", at_ns=made.now + 2000 * MS)]
    assert not only(asked, Reply)
    (reply,) = only(made.say(taken()), Reply)
    assert (reply.to, reply.request) == ("s", "r1")
    assert (reply.body.blocks, reply.body.checksums, reply.body.computed_tokens) == ([[5], [6]], [[50, 60]], 5)
    assert (reply.body.epoch, reply.body.endpoint) == (0, TOLD)


def test_the_first_answer_tells_the_submission_with_every_token_so_far() -> None:
    made = Bench(info=MOVING)
    given = submit(output_token_ids=[8, 9], sampling=Sampling(max_tokens=20, seed=4), deadline_ns=made.now + 10**12)
    made.say(given, reply_to="inbox")
    made.running("other.0")
    made.actor.ledger.get("r1.0").added = True  # type: ignore[union-attr]
    made.step(out(1, 2))
    made.say(lease(), reply_to="s")
    (body,) = bodies(made.say(taken()), KvLeased)
    assert body.submission == msgspec.structs.replace(given, output_token_ids=[8, 9, 1, 2])
    made.say(lease(from_block=2), reply_to="s")
    (later,) = bodies(made.say(taken(from_block=2)), KvLeased)
    assert (later.submission, later.endpoint) == (None, None)


def not_taken() -> Bench:
    made = Bench(info=MOVING)
    made.submit()
    return made


def finished() -> Bench:
    made = bench()
    made.step(out(4, finish=FinishReason.STOP))
    return made


@pytest.mark.parametrize(
    ("made", "body", "reason"),
    [
        (bench, lease(sequence="nobody.0"), KvRefusal.UNKNOWN_SEQUENCE),
        (bench, lease(epoch=1), KvRefusal.UNKNOWN_SEQUENCE),
        (bench, lease(from_block=-1), KvRefusal.INVALID),
        (not_taken, lease(), KvRefusal.NOT_RUNNING),
        (finished, lease(), KvRefusal.UNKNOWN_SEQUENCE),
        (lambda: bench(sampling=Sampling(max_tokens=10, prompt_logprobs=1)), lease(), KvRefusal.NOT_RUNNING),
        (lambda: bench(migration=MigrationConfig(enabled=False)), lease(), KvRefusal.UNABLE),
    ],
)
def test_what_cannot_be_moved_is_not_leased(made: Callable[[], Bench], body: LeaseKv, reason: KvRefusal) -> None:
    worker = made()
    effects = worker.say(body, reply_to="s")
    assert refusal(effects) is reason
    assert not only(effects, LeaseInEngine)
    assert worker.actor.figures.kv_refused[reason] == 1


def test_one_that_has_come_moves_on_only_after_it_decoded_here() -> None:
    """Else its client would wait for two moves in a row."""
    made = Bench(info=MOVING)
    made.say(submit(epoch=1, migration="m0", output_token_ids=[8, 9]), reply_to="inbox")
    made.say(SequenceAdded(sequence="r1.0"))
    effects = made.say(lease(epoch=1), reply_to="s")
    assert refusal(effects) is KvRefusal.NOT_RUNNING
    assert not only(effects, LeaseInEngine)
    made.step(out(1))
    assert only(made.say(lease(epoch=1), reply_to="s"), LeaseInEngine)


def test_a_sequence_whose_kv_cannot_move_is_leased_to_be_computed_elsewhere() -> None:
    made = bench(info=msgspec.structs.replace(INFO, kv_refusal="its self-test failed"))
    (asked,) = only(made.say(lease(), reply_to="s"), LeaseInEngine)
    (body,) = bodies(made.say(taken()), KvLeased)
    assert (asked.sequence, body.endpoint) == ("r1.0", None)
    assert body.submission.output_token_ids == [1, 2, 3]


def test_no_more_are_leased_than_may_and_each_to_one_migration() -> None:
    made = bench(migration=MigrationConfig(leases_max=3))
    for index in range(3):
        made.running(f"q{index}.0")
        made.say(lease(f"q{index}.0", migration=f"n{index}"))
        made.say(taken(f"n{index}", f"q{index}.0"))
    assert refusal(made.say(lease(), reply_to="s")) is KvRefusal.TOO_MANY
    assert refusal(made.say(lease("q0.0", migration="m2"), reply_to="s")) is KvRefusal.TOO_MANY
    made.say(end(moved=False, migration="n1", sequence="q1.0"))
    assert only(made.say(lease(), reply_to="s"), LeaseInEngine)


def test_one_migration_does_not_lease_two_sequences() -> None:
    made = leased()
    made.running("r2.0")
    assert refusal(made.say(lease("r2.0"), reply_to="s")) is KvRefusal.INVALID


def test_a_repeated_lease_waits_for_the_same_answer() -> None:
    made = bench()
    made.say(lease(), reply_to="s1")
    again = made.say(lease(), reply_to="s2")
    assert not only(again, LeaseInEngine)
    assert [reply.to for reply in only(made.say(taken()), Reply)] == ["s1", "s2"]


def test_a_renewal_moves_the_deadline_and_never_shortens_it() -> None:
    made = leased()
    later = made.say(lease(from_block=2), after_ms=1500)
    assert only(later, StartTimer) == [StartTimer(name="lease/m1", at_ns=made.now + 2000 * MS)]
    until = made.now + 2000 * MS
    made.say(taken(from_block=2))
    assert only(made.say(lease(from_block=2, lease_ms=1)), StartTimer) == [StartTimer(name="lease/m1", at_ns=until)]


def test_no_lease_and_no_freeze_is_longer_than_allowed() -> None:
    made = bench(migration=MigrationConfig(lease_ms_max=500, freeze_ms_max=100))
    assert only(made.say(lease(lease_ms=10**9)), StartTimer)[0].at_ns == made.now + 500 * MS
    made.say(taken())
    assert only(made.say(freeze(freeze_ms=10**9)), StartTimer)[0].at_ns == made.now + 100 * MS


def test_a_lease_that_nobody_renews_ends_and_stays_over() -> None:
    made = leased()
    early = due(made, 1999)
    assert only(early, StartTimer)
    assert not only(early, EndLeaseInEngine)
    effects = due(made, 1)
    assert only(effects, EndLeaseInEngine) == [EndLeaseInEngine(migration="m1", moved=False)]
    assert made.actor.figures.leases_expired == 1
    assert refusal(made.say(lease(), reply_to="s")) is KvRefusal.LEASE_LOST
    assert refusal(made.say(freeze(), reply_to="s")) is KvRefusal.LEASE_LOST
    assert made.say(end(moved=False)) == []
    assert chunks(made.step(out(4)))[0].token_ids == [4]


def test_what_the_engine_denies_at_first_may_be_asked_again() -> None:
    made = bench()
    made.say(lease(), reply_to="s")
    effects = made.say(denied(KvRefusal.NOT_RUNNING))
    assert refusal(effects) is KvRefusal.NOT_RUNNING
    assert only(effects, CancelTimer) == [CancelTimer(name="lease/m1")]
    assert only(made.say(lease(), reply_to="s"), LeaseInEngine)


def test_a_renewal_that_is_denied_leaves_the_lease_unless_it_is_lost() -> None:
    made = leased()
    made.say(lease(from_block=2), reply_to="s")
    assert refusal(made.say(denied(KvRefusal.NOT_RUNNING))) is KvRefusal.NOT_RUNNING
    assert only(made.say(lease(from_block=2), reply_to="s"), LeaseInEngine)
    lost = made.say(denied(KvRefusal.LEASE_LOST))
    assert refusal(lost) is KvRefusal.LEASE_LOST
    assert made.actor.figures.leases_lost == 1
    assert refusal(made.say(freeze(), reply_to="s")) is KvRefusal.LEASE_LOST


def test_a_freeze_stops_it_and_is_answered_after_its_tokens() -> None:
    made = leased()
    assert chunks(made.step(out(4), after_ms=1))[0].token_ids == [4]
    asked = made.say(freeze(), reply_to="s")
    assert only(asked, FreezeInEngine) == [FreezeInEngine(migration="m1", sequence="r1.0", from_block=1)]
    assert only(asked, StartTimer) == [StartTimer(name="lease/m1", at_ns=made.now + 250 * MS)]
    effects = made.say(stopped(1, 2, 3, 4))
    assert [type(effect).__name__ for effect in effects] == ["Reply"]
    (body,) = bodies(effects, SequenceFrozen)
    assert (body.output_token_ids, body.blocks, body.checksums) == ([1, 2, 3, 4], [[6], [7]], [[60, 70]])
    assert (body.epoch, body.from_block, body.computed_tokens, body.frozen_ns) == (0, 1, 5, 77)
    assert body.logprobs is None
    assert not chunks(made.tick())  # nothing is left to tell


def test_a_freeze_is_a_renewal_where_more_is_full_than_its_asker_wants_to_read_then() -> None:
    made = leased()
    for most, freezes in ((1, False), (2, True)):
        asked = made.say(freeze(from_block=2, new_blocks_max=most, lease_ms=500), reply_to="s")
        assert only(asked, LeaseInEngine) == [LeaseInEngine(migration="m1", sequence="r1.0", from_block=2)]
        told = made.say(taken(from_block=2), after_ms=1)
        assert [len(body.blocks) for body in bodies(told, KvLeased)] == ([] if freezes else [2])
        assert bool(only(told, FreezeInEngine)) is freezes
    assert only(told, StartTimer) == [StartTimer(name="lease/m1", at_ns=made.now + 249 * MS)]


def test_a_repeated_freeze_gets_the_same_answer_and_no_more_time() -> None:
    made = leased()
    made.say(freeze(), reply_to="s1")
    assert not only(made.say(freeze(), reply_to="s2", after_ms=10), FreezeInEngine)
    first = made.say(stopped(1, 2, 3))
    assert [reply.to for reply in only(first, Reply)] == ["s1", "s2"]
    again = made.say(freeze(), reply_to="s3", after_ms=100)
    assert bodies(again, SequenceFrozen) == bodies(first, SequenceFrozen)[:1]
    assert not only(again, FreezeInEngine)
    assert only(due(made, 140), EndLeaseInEngine)


def test_tokens_of_earlier_epochs_count_in_a_freeze() -> None:
    made = leased(output_token_ids=[8, 9], sampling=Sampling(max_tokens=20))
    made.say(freeze(), reply_to="s")
    assert bodies(made.say(stopped(8, 9, 1, 2, 3)), SequenceFrozen)[0].output_token_ids == [8, 9, 1, 2, 3]


def test_log_probabilities_that_ingress_may_still_miss_go_along() -> None:
    entries = [TokenLogprobs(token_ids=[token], logprobs=[-0.1], rank=1) for token in range(5)]
    made = Bench(info=MOVING)
    made.running(sampling=Sampling(max_tokens=10, logprobs=0))
    made.step(out(0, 1, logprobs=entries[:2]))
    made.tick()
    made.step(out(2, logprobs=entries[2:3]))
    made.tick()
    made.step(out(3, 4, logprobs=entries[3:]))
    leased(made).say(freeze(), reply_to="s")
    assert bodies(made.say(stopped(0, 1, 2, 3, 4)), SequenceFrozen)[0].logprobs == entries[2:]


def test_a_freeze_needs_a_lease_that_was_granted_for_this_sequence_and_epoch() -> None:
    made = bench()
    assert refusal(made.say(freeze(), reply_to="s")) is KvRefusal.LEASE_LOST
    made.say(lease(), reply_to="s")
    assert refusal(made.say(freeze(), reply_to="s")) is KvRefusal.LEASE_LOST
    made.say(taken())
    assert refusal(made.say(freeze(epoch=3), reply_to="s")) is KvRefusal.UNKNOWN_SEQUENCE


def test_a_freeze_that_the_engine_denies_leaves_the_lease() -> None:
    made = leased()
    made.say(freeze(), reply_to="s")
    effects = made.say(denied(KvRefusal.NOT_RUNNING))
    assert refusal(effects) is KvRefusal.NOT_RUNNING
    (timer,) = only(effects, StartTimer)
    assert timer.at_ns > made.now + 1000 * MS  # the lease's own deadline again
    assert only(made.say(freeze(), reply_to="s"), FreezeInEngine)


def test_a_freeze_behind_a_renewal_waits_for_its_answer() -> None:
    made = leased()
    made.say(lease(from_block=2), reply_to="s1")
    assert not only(made.say(freeze(), reply_to="s2"), FreezeInEngine)
    effects = made.say(taken(from_block=2))
    assert [reply.to for reply in only(effects, Reply)] == ["s1"]
    assert only(effects, FreezeInEngine)


def test_a_frozen_sequence_decodes_on_by_itself_when_its_time_is_over() -> None:
    made = frozen()
    assert not only(due(made, 200), EndLeaseInEngine)
    effects = due(made, 50)
    assert only(effects, EndLeaseInEngine) == [EndLeaseInEngine(migration="m1", moved=False)]
    assert [log.event for log in only(effects, Log)] == ["thawed_by_deadline"]
    figures = made.actor.figures
    assert (figures.thaws, figures.leases_expired) == (1, 0)
    assert figures.frozen.count == 1
    assert figures.frozen.sum == pytest.approx(0.25)
    assert made.say(end(moved=True), reply_to="s") == [], "it has not moved, whatever the migrator says"
    assert made.actor.ledger.live == 1
    assert chunks(made.step(out(4)))[0].first_index == 3


def test_renewing_the_lease_gives_a_frozen_sequence_no_more_time() -> None:
    made = frozen()
    made.say(lease(from_block=2, lease_ms=10_000), reply_to="s")
    made.say(taken(from_block=2))
    assert only(due(made, 250), EndLeaseInEngine)


def test_a_freeze_without_an_answer_ends_at_its_deadline_too() -> None:
    made = leased()
    made.say(freeze(), reply_to="s")
    effects = due(made, 250)
    assert only(effects, EndLeaseInEngine)
    assert refusal(effects) is KvRefusal.LEASE_LOST
    assert made.say(stopped(1, 2, 3)) == []


def test_tokens_that_the_engine_says_otherwise_end_the_lease() -> None:
    made = leased()
    made.say(freeze(), reply_to="s")
    effects = made.say(stopped(1, 2, 9))
    assert refusal(effects) is KvRefusal.INVALID
    assert only(effects, EndLeaseInEngine) == [EndLeaseInEngine(migration="m1", moved=False)]
    assert only(effects, Log)[0].level == "error"


def test_a_moved_sequence_is_let_go_its_fence_stays_and_its_spans_say_so() -> None:
    made = frozen(traceparent=TRACE)
    effects = made.say(end(moved=True), reply_to="s", after_ms=40)
    assert only(effects, EndLeaseInEngine) == [EndLeaseInEngine(migration="m1", moved=True)]
    assert not only(effects, CancelInEngine)
    spans = only(effects, RecordSpan)
    assert {span.attributes["millrace.outcome"] for span in spans} == {"moved"}
    assert not any(span.error for span in spans)
    assert (made.actor.ledger.live, len(made.actor.ledger)) == (0, 0)
    assert made.actor.figures.frozen.sum == pytest.approx(0.04)
    assert chunks(made.step(out(4))) == []
    assert made.actor.figures.late_outputs == 1
    assert bodies(made.submit(epoch=0), SequenceRefused)[0].reason is RefusalReason.STALE_EPOCH
    assert bodies(made.say(ResendTokens(sequence="r1.0", epoch=0, from_index=0), reply_to="i"), ErrorReply)
    assert only(made.submit(epoch=2), AddToEngine)  # it may come back in a later one


def test_an_aborted_freeze_decodes_on_at_once() -> None:
    made = frozen()
    effects = made.say(end(moved=False), reply_to="s", after_ms=30)
    assert only(effects, EndLeaseInEngine) == [EndLeaseInEngine(migration="m1", moved=False)]
    assert only(effects, CancelTimer) == [CancelTimer(name="lease/m1")]
    assert (made.actor.figures.thaws, made.actor.ledger.live) == (0, 1)
    assert chunks(made.step(out(4)))[0].token_ids == [4]


def test_what_never_stood_still_has_not_moved_whatever_the_migrator_says() -> None:
    made = leased()
    effects = made.say(end(moved=True), reply_to="s")
    assert only(effects, EndLeaseInEngine) == [EndLeaseInEngine(migration="m1", moved=False)]
    assert made.actor.ledger.live == 1


def test_a_lease_that_comes_after_its_end_was_overtaken_by_it() -> None:
    made = bench()
    assert made.say(end(moved=False)) == []
    assert refusal(made.say(lease(), reply_to="s")) is KvRefusal.LEASE_LOST


def test_an_end_in_another_epoch_ends_nothing() -> None:
    made = frozen()
    effects = made.say(end(moved=True, epoch=1), reply_to="s")
    assert effects == []
    assert made.actor.snapshot()["leases"] == {"m1": {"sequence": "r1.0", "epoch": 0, "frozen": True}}


def test_an_end_of_a_lease_whose_answer_did_not_come_in_time_knows_no_epoch() -> None:
    made = bench()
    made.say(lease(), reply_to="s")
    assert only(made.say(end(moved=False, epoch=-1)), EndLeaseInEngine)
    assert made.actor.snapshot()["leases"] == {}
    assert only(made.say(lease(migration="m2"), reply_to="s"), LeaseInEngine), "another migration may try it at once"


def cancelled(made: Bench) -> list[Effect]:
    return made.say(CancelSequence(sequence="r1.0", epoch=0))


DEAD = ServicePresence(role="ingress", name="i0", incarnation=0, at_ns=10**19, state=PresenceState.DEAD)
ENDS = [
    cancelled,
    lambda made: made.step(out(4, finish=FinishReason.STOP)),
    lambda made: made.submit(epoch=4),
    lambda made: made.say(DEAD),
]


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("begun", [leased, frozen])
def test_a_lease_is_lost_with_its_sequence_however_that_ends(begun: Any, ends: Any) -> None:
    made = begun()
    effects = ends(made)
    assert only(effects, EndLeaseInEngine) == [EndLeaseInEngine(migration="m1", moved=False)]
    assert ends is not cancelled or only(effects, CancelInEngine) == [CancelInEngine(sequences=["r1.0"])]
    assert made.actor.figures.leases_lost == 1
    assert made.actor.snapshot()["leases"] == {}
    assert refusal(made.say(freeze(), reply_to="s")) is KvRefusal.LEASE_LOST
    assert made.say(end(moved=True)) == []


@pytest.mark.parametrize("ends", ENDS)
def test_a_freeze_under_way_is_refused_when_its_sequence_ends(ends: Any) -> None:
    made = leased()
    made.say(freeze(), reply_to="s")
    assert refusal(ends(made)) is KvRefusal.LEASE_LOST
    assert made.say(stopped(1, 2, 3)) == []


def test_a_frozen_sequence_is_not_handed_back_since_its_blocks_may_be_read() -> None:
    """The last snapshot is of the time before it began to run."""
    made = frozen()
    waited = SequenceStatus("r1.0", SequenceState.WAITING, 10, 0, 0, 20, 0, made.now)
    made.say(EngineObserved(snapshot=msgspec.structs.replace(snapshot(made.now), waiting=[waited])))
    assert made.say(ReturnSequences(sequences=["r1.0"])) == []
    due(made, 250)
    effects = made.say(ReturnSequences(sequences=["r1.0"]))
    assert only(effects, CancelInEngine) == [CancelInEngine(sequences=["r1.0"])]


def test_a_draining_worker_still_gives_leases_and_leaves_when_all_have_moved() -> None:
    made = bench()
    made.say(DrainWorker(limit_ms=5000))
    effects = frozen(made).say(end(moved=True), reply_to="s")
    assert type(effects[-1]).__name__ == "Stop"


def test_the_record_says_where_kv_lies_or_why_it_does_not_move() -> None:
    (put,) = only(Bench(info=MOVING).first, PutKey)
    assert (put.value.kv, put.value.kv_refusal) == (TOLD, "")
    still = Bench(info=msgspec.structs.replace(INFO, kv_refusal="its self-test failed"))
    (put,) = only(still.first, PutKey)
    assert (put.value.kv, put.value.kv_refusal) == (None, "its self-test failed")
    assert [line.fields for line in only(still.first, Log)] == [{"why": "its self-test failed"}]
    assert not only(Bench(info=MOVING).first, Log)
