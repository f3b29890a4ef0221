"""A migration: its steps, every way to fail, how long its source stands still, and what heartbeats tell of it."""

from typing import Any

import msgspec
import pytest
from millrace.actor.effects import Log
from millrace.contracts.broker import MoveReason
from millrace.contracts.codec import decode, encode
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import (
    EndLease,
    FreezeSequence,
    KvLeased,
    KvPulled,
    LeaseKv,
    MigrationPrepared,
    PrepareMigration,
    PullKv,
    SequenceFrozen,
    UnreserveKv,
)
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.contracts.migration import AllotEpoch, EpochAllotted, MigrationFinished, MigrationMode, MigrationOutcome
from millrace.contracts.status import InstanceMigrations, ServicePresence
from millrace.contracts.worker import CancelSequence, Images, SequenceAccepted, SubmitSequence
from millrace.kvcache.chain import extend_chain, unpack_hashes

from services.migrator.actor import TOLD_MAX
from services.migrator.config import MigratorLimits
from services.migrator.outgoing import MIGRATIONS_MAX
from tests.unit.migrator_rig import BLOCK_TOKENS, MS, START_NS, Rig, endpoint, record

HANDSHAKE = (LeaseKv, AllotEpoch, PrepareMigration, PullKv, FreezeSequence, SubmitSequence, EndLease)
ANSWERS = (KvLeased, EpochAllotted, MigrationPrepared, KvPulled, SequenceFrozen, SequenceAccepted)


def decoding() -> Rig:
    """Two instances; a sequence runs at the first."""
    rig = Rig("a", "b")
    rig.decode("a")
    return rig


def where(rig: Rig, sequence: str = "r.0") -> list[str]:
    return [name for name, worker in rig.workers.items() if sequence in worker.sequences]


def test_a_sequence_moves_with_all_its_tokens_in_a_higher_epoch() -> None:
    rig = decoding()
    body = rig.migrate(target="b")
    assert (body.outcome, body.refusal, body.epoch, body.target) == (MigrationOutcome.MOVED, None, 4, "b")
    assert 0 < body.cost.frozen_ns < min(1 * MS, body.cost.duration_ns), "the gap is from the stop to the commit"
    assert where(rig) == ["b"]
    submitted = rig.published(SubmitSequence)[0]
    frozen = rig.published(SequenceFrozen)[0]
    assert submitted.output_token_ids == frozen.output_token_ids
    assert (submitted.epoch, submitted.handover.from_block) == (4, frozen.from_block)
    assert not rig.workers["b"].reserved
    assert not rig.workers["a"].leases


def test_a_short_sequence_moves_in_eleven_messages_and_without_the_targets_migrator() -> None:
    rig = decoding()
    rig.kill("b")
    rig.migrate(target="b")
    handshake = [name for name in rig.words() if name not in ("MigrationFinished", "UnreserveKv")]
    assert " ".join(handshake) == (
        "LeaseKv KvLeased AllotEpoch EpochAllotted PrepareMigration MigrationPrepared "
        "FreezeSequence SequenceFrozen SubmitSequence SequenceAccepted EndLease"
    )


def test_every_block_is_read_once_and_none_is_left_out() -> None:
    rig = Rig("a", "b")
    rig.workers["b"].pull_ns = 60 * MS
    rig.decode("a", prompt=90)
    rig.migrate(target="b")
    read = [position for first, last in rig.workers["b"].read for position in range(first, last)]
    handover = rig.published(SubmitSequence)[0].handover
    positions = [*read, *range(handover.from_block, handover.from_block + len(handover.blocks))]
    submitted = rig.published(SubmitSequence)[0]
    tokens = len(submitted.prompt_token_ids) + len(submitted.output_token_ids)
    assert positions == list(range(-(-tokens // BLOCK_TOKENS)))
    assert handover.computed_tokens == tokens - 1


def test_everybody_hears_the_names_of_the_blocks_that_the_target_has_since() -> None:
    rig = Rig("a", "b")
    rig.decode("a", prompt=90)
    body = rig.migrate(target="b")
    submitted = rig.published(SubmitSequence)[0]
    tokens, hashes = submitted.prompt_token_ids + submitted.output_token_ids, list[int]()
    extend_chain(hashes, tokens[: submitted.handover.computed_tokens], BLOCK_TOKENS)
    assert body.block_size == BLOCK_TOKENS
    assert unpack_hashes(body.block_hashes) == tuple(hashes)
    assert len(hashes) > 90 // BLOCK_TOKENS, "what was decoded is among them"


IMAGES = Images(prompt=[1, 5], data=[b"png"], digest="d")


@pytest.mark.parametrize("kept_apart", [{"cache_salt": "one tenant's"}, {"images": IMAGES}])
def test_blocks_that_another_sequence_of_the_same_tokens_must_not_have_are_not_looked_up(
    kept_apart: dict[str, Any],
) -> None:
    rig = decoding()
    held = rig.workers["a"].sequences["r.0"]
    sampling = msgspec.structs.replace(held.submission.sampling, **kept_apart)
    held.submission = msgspec.structs.replace(held.submission, sampling=sampling)
    assert rig.migrate(target="b").outcome is MigrationOutcome.MOVED
    (prepared,) = rig.published(PrepareMigration)
    assert prepared.token_ids == held.submission.prompt_token_ids[:1]
    assert rig.published(SubmitSequence)[0].sampling == sampling


def test_what_the_targets_prefix_cache_has_does_not_travel() -> None:
    rig = Rig("a", "b")
    rig.workers["b"].matched = 7
    rig.decode("a")
    body = rig.migrate(target="b")
    assert body.cost.matched_blocks == 7
    assert rig.workers["b"].read[0][0] == 7


def test_a_large_round_is_read_in_several_pulls_with_their_checksums() -> None:
    rig = Rig("a", "b", limits=MigratorLimits(pull_bytes_max=3_000))
    rig.decode("a")
    body = rig.migrate(target="b")
    assert body.outcome is MigrationOutcome.MOVED
    assert max(last - first for first, last in rig.workers["b"].read) == 3
    assert len(rig.workers["b"].read) > body.cost.rounds
    for pull in rig.published(PullKv):
        assert pull.checksums == [[block - 100 for (block,) in pull.blocks]]


def test_pulls_grow_to_what_a_quarter_of_a_lease_can_copy() -> None:
    rig = Rig("a", "b", limits=MigratorLimits(pull_bytes_first=2_000, lease_ms=400))
    rig.workers["b"].pull_ns = 40 * MS
    rig.decode("a", prompt=80)
    body = rig.migrate(target="b")
    sizes = [last - first for first, last in rig.workers["b"].read]
    assert body.outcome is MigrationOutcome.MOVED
    assert sizes[:2] == [2, 4], "two blocks took 40 of 100 ms"


def test_rounds_end_where_copying_is_slower_than_decoding() -> None:
    rig = Rig("a", "b", limits=MigratorLimits(pull_bytes_max=1_000, rounds_max=3, growth_blocks=50))
    rig.workers["b"].pull_ns = 19 * MS  # a block is full every 20 ms
    rig.decode("a", prompt=20)
    body = rig.migrate(target="b", run_ms=20_000)
    assert (body.outcome, body.cost.rounds) == (MigrationOutcome.MOVED, 3)


def test_what_outgrows_the_reservation_travels_with_the_tail() -> None:
    rig = Rig("a", "b", limits=MigratorLimits(pull_bytes_max=2_000, growth_blocks=2))
    rig.workers["b"].pull_ns = 30 * MS  # a block is full every 20 ms: many are, before the copying has caught up
    rig.decode("a", prompt=80)
    body = rig.migrate(target="b", run_ms=20_000)
    room = rig.published(PrepareMigration)[0].blocks
    assert body.outcome is MigrationOutcome.MOVED
    assert max(last for _, last in rig.workers["b"].read) == room
    handover = rig.published(SubmitSequence)[0].handover
    assert handover.from_block == room
    assert len(handover.blocks) > 1, "the rest is more than a partial block"


def test_stop_and_copy_reads_everything_while_the_source_stands_still() -> None:
    rig = decoding()
    body = rig.migrate(target="b", mode=MigrationMode.STOP_AND_COPY)
    assert (body.outcome, body.cost.rounds, body.mode) == (MigrationOutcome.MOVED, 0, MigrationMode.STOP_AND_COPY)
    assert not rig.workers["b"].read
    assert rig.published(SubmitSequence)[0].handover.from_block == 0


def test_recompute_needs_no_kv_that_can_move() -> None:
    rig = Rig("a", "b")
    for name in ("a", "b"):
        rig.register(record(name, kv=None, kv_refusal="its self-test failed"))
        rig.workers[name].kv_moves = False
    rig.decode("a")
    body = rig.migrate(target="b", mode=MigrationMode.RECOMPUTE)
    assert (body.outcome, where(rig), body.block_hashes) == (MigrationOutcome.MOVED, ["b"], b"")
    (submitted,) = rig.published(SubmitSequence)
    assert (submitted.handover, submitted.migration) == (None, body.migration)
    assert submitted.output_token_ids == rig.published(SequenceFrozen)[0].output_token_ids


@pytest.mark.parametrize(
    ("target", "refusal"),
    [("a", KvRefusal.INVALID), ("nobody", KvRefusal.NO_TARGET), ("other", KvRefusal.INCOMPATIBLE)],
)
def test_a_target_that_cannot_take_it_is_refused_at_once(target: str, refusal: KvRefusal) -> None:
    rig = Rig("a", "b")
    rig.register(record("other", kv=endpoint(fingerprint="g")))
    rig.decode("a")
    body = rig.migrate(target=target)
    assert (body.outcome, body.refusal) == (MigrationOutcome.REFUSED, refusal)
    assert (body.block_size, body.block_hashes) == (0, b"")
    assert not rig.published(LeaseKv)


def test_an_engine_that_moves_nothing_says_why() -> None:
    rig = Rig("a", "b")
    rig.register(record("a", kv=None, kv_refusal="its self-test failed"))
    body = rig.migrate()
    assert (body.refusal, body.detail) == (KvRefusal.UNABLE, "its self-test failed")


def test_a_sequence_that_is_not_there_is_refused() -> None:
    body = Rig("a", "b").migrate(target="b")
    assert (body.outcome, body.refusal) == (MigrationOutcome.REFUSED, KvRefusal.UNKNOWN_SEQUENCE)


def test_an_epoch_that_ingress_does_not_allot_ends_it() -> None:
    rig = decoding()
    rig.refuse_epochs = True
    body = rig.migrate(target="b")
    assert (body.refusal, body.detail, where(rig)) == (KvRefusal.EPOCH_REFUSED, "it has ended", ["a"])


@pytest.mark.parametrize("step", [PrepareMigration, PullKv, SubmitSequence])
def test_a_no_of_the_targets_worker_leaves_the_sequence_at_its_source(step: type[Body]) -> None:
    rig = decoding()
    rig.workers["b"].refuse[step] = KvRefusal.COPY_FAILED
    body = rig.migrate(target="b")
    assert body.outcome is (MigrationOutcome.ABORTED if step is SubmitSequence else MigrationOutcome.REFUSED)
    assert where(rig) == ["a"]
    assert rig.workers["a"].sequences["r.0"].frozen is None
    assert not rig.workers["b"].reserved
    assert not rig.workers["a"].leases


def test_a_no_of_the_source_frees_what_the_target_reserved() -> None:
    rig = decoding()
    rig.order(target="b")
    rig.run(1)
    rig.workers["a"].refuse[FreezeSequence] = KvRefusal.LEASE_LOST
    rig.run(3_000)
    finished = rig.published(MigrationFinished)[0]
    assert (finished.outcome, finished.refusal) == (MigrationOutcome.REFUSED, KvRefusal.LEASE_LOST)
    assert not rig.workers["b"].reserved
    assert where(rig) == ["a"]


@pytest.mark.parametrize("lost", [*HANDSHAKE, *ANSWERS])
def test_any_message_may_be_lost_for_good(lost: type[Body]) -> None:
    rig = decoding()
    rig.lose = lambda sender, body: isinstance(body, lost)
    body = rig.migrate(target="b", run_ms=6_000)
    assert body.outcome in MigrationOutcome
    assert len(rig.published(MigrationFinished)) == 2, "published once, answered once"
    if lost in HANDSHAKE[:3]:
        assert (body.outcome, body.refusal) == (MigrationOutcome.REFUSED, KvRefusal.UNANSWERED)
        assert where(rig) == ["a"], "before the freeze it decodes on"
    assert not rig.workers["b"].reserved
    # Whether it is at both is for ingress to judge; nowhere it never is, unless its client cancelled it.
    assert where(rig)


def test_more_than_the_bound_are_refused() -> None:
    rig = Rig("a", "b")
    rig.workers["b"].pull_ns, rig.workers["b"].reservations_max = 500 * MS, MIGRATIONS_MAX
    for index in range(MIGRATIONS_MAX + 1):
        rig.decode("a", f"r.{index}")
        rig.order(f"r.{index}")
    rig.run(1)
    refused = [body.refusal for body in rig.answers]  # type: ignore[attr-defined]
    assert refused == [KvRefusal.TOO_MANY]


def test_a_sequence_moves_once_at_a_time() -> None:
    rig = Rig("a", "b", "c")
    rig.decode("a")
    rig.order()
    rig.run(1)
    rig.order(target="c")
    rig.run(1_000)
    assert [body.refusal for body in rig.answers] == [KvRefusal.INVALID, None]  # type: ignore[attr-defined]
    assert where(rig) == ["b"]


def test_the_award_goes_to_the_targets_worker_and_its_refusal_comes_back() -> None:
    rig = decoding()
    rig.workers["b"].refuse[PrepareMigration] = KvRefusal.NO_BID
    body = rig.migrate(award="ask-1", reason=MoveReason.BOUNDARY)
    assert rig.published(PrepareMigration)[0].award == "ask-1"
    assert (body.award, body.reason, body.refusal) == ("ask-1", MoveReason.BOUNDARY, KvRefusal.NO_BID)


def test_a_freeze_that_takes_too_long_is_given_up() -> None:
    rig = Rig("a", "b", limits=MigratorLimits(freeze_ms=40, margin_ms=20))
    rig.decode("a")
    rig.lose = lambda sender, body: isinstance(body, SubmitSequence)
    body = rig.migrate(target="b")
    assert (body.outcome, body.refusal) == (MigrationOutcome.ABORTED, KvRefusal.UNANSWERED)
    assert body.cost.tokens > 0
    assert rig.published(UnreserveKv)
    assert where(rig) == ["a"]


def test_a_stopping_migrator_lets_every_source_go_on_and_answers_who_waits() -> None:
    rig = Rig("a", "b")
    rig.workers["b"].pull_ns = 500 * MS
    rig.decode("a")
    rig.order(target="b")
    rig.run(20)
    rig.stop("a")
    rig.run(100)
    assert [body.refusal for body in rig.answers] == [KvRefusal.CANCELLED]  # type: ignore[attr-defined]
    assert not rig.workers["a"].leases
    assert not rig.workers["b"].reserved
    assert "a" in rig.stopped


def test_a_migrator_that_stops_amid_a_commit_leaves_the_source_standing_while_the_target_reads() -> None:
    rig = decoding()
    rig.lose = lambda sender, body: isinstance(body, SequenceAccepted)
    rig.order(target="b")
    rig.run(10)
    assert rig.published(SequenceAccepted)
    rig.stop("a")
    rig.run(100)
    assert not rig.published(EndLease), "its own deadline lets it go on"
    assert len(rig.answers) == 1


def test_a_lease_that_slow_answers_used_up_is_renewed_before_anything_is_read() -> None:
    rig = Rig("a", "b", limits=MigratorLimits(lease_ms=500, pull_bytes_first=2_000))
    rig.workers["b"].slow_ns = 400 * MS
    rig.decode("a")
    body = rig.migrate(target="b", run_ms=8_000)
    assert body.outcome is MigrationOutcome.MOVED
    asked = [type(each).__name__ for sender, each in rig.said if sender == "a" and isinstance(each, HANDSHAKE)]
    assert asked[:5] == ["LeaseKv", "AllotEpoch", "PrepareMigration", "LeaseKv", "PullKv"]


def test_engines_in_long_steps_get_longer_freezes_up_to_the_bound() -> None:
    freezes = []
    for slow_ms in (0, 300, 900):
        rig = Rig("a", "b", limits=MigratorLimits(lease_ms=5_000))
        rig.workers["a"].slow_ns = rig.workers["b"].slow_ns = slow_ms * MS
        rig.decode("a", prompt=4)
        assert rig.migrate(target="b", run_ms=15_000).outcome is MigrationOutcome.MOVED
        freezes.append(rig.published(FreezeSequence)[0].freeze_ms)
    assert freezes[0] == 250
    assert 850 <= freezes[1] <= 870
    assert freezes[2] == 2_000


def test_its_span_is_below_the_one_that_placed_the_sequence() -> None:
    rig = decoding()
    rig.migrate(target="b")
    (span,) = rig.spans
    assert (span.name, span.parent_span_id) == ("migration", "b" * 16)
    assert [name for name, _, _ in span.events][-2:] == ["frozen", "committed"]


def test_a_message_for_nobody_here_is_answered() -> None:
    rig = Rig("a", "b")
    rig.ask("a", CancelSequence(sequence="r.0", epoch=1))
    rig.run(1)
    assert isinstance(rig.answers[0], ErrorReply)


def told_at(rig: Rig) -> list[tuple[int, Body]]:
    """Record what is said from now on, and when; nothing of it is lost."""
    said: list[tuple[int, Body]] = []
    rig.lose = lambda _sender, body: bool(said.append((rig.now_ns, body)))  # type: ignore[func-returns-value]
    return said


def first(said: list[tuple[int, Body]], kind: type[Body]) -> Any:
    """Return the time and body of the first message of a kind."""
    return next((at_ns, body) for at_ns, body in said if type(body) is kind)


@pytest.mark.parametrize("clock_ms", [0, 86_400_000, -3_000])
def test_the_tails_deadline_is_told_by_the_clock_of_the_targets_worker_and_never_too_late(clock_ms: int) -> None:
    rig = Rig("a", "b")
    rig.workers["b"].clock_ns = clock_ms * MS
    rig.decode("a")
    said = told_at(rig)
    assert rig.migrate(target="b").outcome is MigrationOutcome.MOVED
    latest_ns = first(said, FreezeSequence)[0] + (250 - MigratorLimits().margin_ms) * MS
    by_our_clock_ns = first(said, SubmitSequence)[1].handover.until_ns - clock_ms * MS
    assert latest_ns - 10 * MS < by_our_clock_ns < latest_ns, "earlier by what the answer took"


@pytest.mark.parametrize(("faster", "early_ms"), [(False, 300), (True, 0)])
def test_a_slow_answer_makes_the_deadline_earlier_until_a_faster_one_is_heard(*, faster: bool, early_ms: int) -> None:
    rig = Rig("a", "b", limits=MigratorLimits(lease_ms=5_000))
    rig.workers["b"].slow_ns = 300 * MS
    rig.decode("a")
    said: list[tuple[int, Body]] = []

    def listen(_sender: str, body: Body) -> bool:
        said.append((rig.now_ns, body))
        if faster and isinstance(body, MigrationPrepared):
            rig.workers["b"].slow_ns = 0
        return False

    rig.lose = listen
    assert rig.migrate(target="b", run_ms=8_000).outcome is MigrationOutcome.MOVED
    (frozen_ns, freeze), (_, submit) = first(said[::-1], FreezeSequence), first(said, SubmitSequence)
    gap_ms = (frozen_ns - submit.handover.until_ns) // MS + freeze.freeze_ms - MigratorLimits().margin_ms
    assert early_ms <= gap_ms < early_ms + 10


def test_a_target_that_does_not_tell_its_clock_is_told_no_deadline_by_it() -> None:
    rig = Rig("a", "b")
    rig.workers["b"].clock_ns = None
    rig.decode("a")
    assert rig.migrate(target="b").outcome is MigrationOutcome.MOVED
    (submitted,) = rig.published(SubmitSequence)
    assert submitted.handover.until_ns == 0
    assert submitted.handover.read_ms > 0


# Time that a source stands still: what its worker allows, whatever the migrator is set to.


MODES = [MigrationMode.STOP_AND_COPY, MigrationMode.RECOMPUTE]


def slow_target(mode: MigrationMode, *, answer_ms: int, freeze_ms_max: int) -> Rig:
    """Its worker takes so long for each answer; the source's goes on after ``freeze_ms_max``."""
    rig = Rig("a", "b", mode=mode)
    rig.workers["a"].freeze_ms_max = freeze_ms_max
    rig.workers["b"].slow_ns = answer_ms * MS
    rig.decode("a")
    return rig


@pytest.mark.parametrize("mode", MODES)
def test_what_the_worker_allows_ends_the_wait_for_a_commit_before_it_can_be_taken_for_moved(
    mode: MigrationMode,
) -> None:
    rig = slow_target(mode, answer_ms=500, freeze_ms_max=300)
    finished = rig.migrate(target="b")
    assert finished.outcome is MigrationOutcome.ABORTED
    assert not any(body.moved for body in rig.published(EndLease))
    assert "r.0" in rig.workers["a"].sequences
    (freeze,) = rig.published(FreezeSequence)
    assert freeze.freeze_ms == 300


@pytest.mark.parametrize("mode", MODES)
def test_one_that_is_in_time_moves(mode: MigrationMode) -> None:
    rig = slow_target(mode, answer_ms=200, freeze_ms_max=300)
    assert rig.migrate(target="b").outcome is MigrationOutcome.MOVED
    assert "r.0" not in rig.workers["a"].sequences


@pytest.mark.parametrize(
    ("mode", "answer_ms", "freeze_ms_max", "asked_ms"),
    [(MigrationMode.LIVE, 100, 150, 150), (MigrationMode.RECOMPUTE, 1, 0, MigratorLimits().copy_freeze_ms)],
)
def test_no_mode_asks_for_more_than_is_allowed_and_what_is_set_holds_where_nothing_is_told(
    mode: MigrationMode, answer_ms: int, freeze_ms_max: int, asked_ms: int
) -> None:
    rig = slow_target(mode, answer_ms=answer_ms, freeze_ms_max=freeze_ms_max)
    rig.migrate(target="b")
    assert {body.freeze_ms for body in rig.published(FreezeSequence)} == {asked_ms}


def registered(rig: Rig, instance: str, freeze_ms_max: int) -> list[Log]:
    """Return what a's migrator logs where that registration comes."""
    value = record(instance, kv=endpoint(freeze_ms_max=freeze_ms_max))
    told = KeyChanged(bucket="instance", key=instance, value=value, revision=2)
    return [effect for effect in rig.migrators["a"].handle(Message(told), rig.now_ns) if isinstance(effect, Log)]


def test_limits_above_what_the_worker_allows_are_told_once_with_both_figures() -> None:
    rig = Rig("a", "b", limits=MigratorLimits(copy_freeze_ms=5_000))
    (line,) = registered(rig, "a", 2_000)
    assert (line.level, line.event) == ("warning", "freezes_shortened")
    assert line.fields == {"instance": "a", "copy_freeze_ms": 5_000, "freeze_ms": 250, "freeze_ms_max": 2_000}
    assert registered(rig, "a", 2_000) == []
    assert registered(rig, "a", 1_000) != [], "another bound is other news"
    assert registered(rig, "b", 100) == [], "its own migrator says so"


@pytest.mark.parametrize("freeze_ms_max", [0, 2_000, 10_000])
def test_nothing_is_said_where_nothing_is_shortened(freeze_ms_max: int) -> None:
    assert registered(Rig("a"), "a", freeze_ms_max) == []


# What heartbeats tell of migrations under way.


def heartbeat(rig: Rig, instance: str) -> ServicePresence:
    """Its last one."""
    return [body for name, body in rig.said if name == instance and isinstance(body, ServicePresence)][-1]


def slowly_moving(sequences: int, **limits: int) -> Rig:
    """So many sequences of ``a`` are asked to move to ``b``, whose reads take half a second each."""
    rig = Rig("a", "b", limits=MigratorLimits(**limits))
    rig.workers["b"].pull_ns = 500 * MS
    rig.workers["b"].blocks_free, rig.workers["b"].reservations_max = 10_000, sequences
    for index in range(sequences):
        rig.decode("a", f"r.{index}", prompt=400)
    rig.run(800)
    for index in range(sequences):
        rig.order(f"r.{index}")
    rig.run(250)  # past the second heartbeat
    return rig


def test_the_source_tells_each() -> None:
    rig = slowly_moving(5)
    told = heartbeat(rig, "a")
    assert told.moving == [InstanceMigrations("a", 5)]
    assert [(each.sequence, each.source, each.target, each.step) for each in told.migrations] == [
        (f"r.{index}", "a", "b", "preparing") for index in range(5)
    ]
    assert {each.began_ns for each in told.migrations} == {START_NS + 800 * MS}
    assert decode(encode(told)) == told


def test_what_was_copied_grows_and_in_the_end_nothing_is_told() -> None:
    rig = slowly_moving(1, pull_bytes_first=20_000)  # a fifth of it with each pull
    assert heartbeat(rig, "a").migrations[0].bytes == 0
    rig.run(1_000)
    assert heartbeat(rig, "a").migrations[0].bytes > 0
    rig.run(4_000)
    assert heartbeat(rig, "a").migrations == []
    assert heartbeat(rig, "a").moving == []


def test_a_crowd_is_told_of_up_to_a_bound_and_counted_whole() -> None:
    rig = slowly_moving(TOLD_MAX + 8)
    told = heartbeat(rig, "a")
    assert len(told.migrations) == min(TOLD_MAX, MIGRATIONS_MAX)
    assert told.moving[0].leaving == MIGRATIONS_MAX
