"""The side that takes a sequence: repeated and contradictory questions, reservations without news, aborts."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Publish, Reply, Request, StartTimer
from millrace.contracts.kv import CopierKind, KvRefusal
from millrace.contracts.leases import KvPulled, KvReserved, PullKv, ReserveKv, UnreserveKv
from millrace.contracts.local import Replied, RequestFailed, RequestFailure, TimerFired
from millrace.contracts.message import Body, ErrorReply, Message
from millrace.contracts.migration import (
    AbortMigration,
    BlocksPulled,
    CommitMigration,
    MigrationCommitted,
    MigrationPrepared,
    MigrationRefused,
    PrepareMigration,
    PullBlocks,
)
from millrace.contracts.worker import (
    RefusalReason,
    Sampling,
    SequenceAccepted,
    SequenceRefused,
    SubmitSequence,
)

from services.migrator.actor import MigratorActor
from services.migrator.config import MigratorConfig
from services.migrator.metrics import MigratorMetrics
from tests.unit.migrator_rig import MS, START_NS, endpoint


def submission() -> SubmitSequence:
    return SubmitSequence(
        sequence="r.0",
        epoch=4,
        ingress="i0",
        ingress_incarnation=1,
        prompt_token_ids=[1, 2, 3],
        output_token_ids=[4],
        sampling=Sampling(max_tokens=9),
    )


def prepare(migration: str = "m1") -> PrepareMigration:
    return PrepareMigration(
        migration=migration, source="a", submission=submission(), endpoint=endpoint(), blocks=5, reserve_ms=2_000
    )


def pull(number: int = 1, first: int = 0) -> PullBlocks:
    return PullBlocks(migration="m1", round=number, from_block=first, blocks=[100, 101], read_ms=1_000)


def commit() -> CommitMigration:
    return CommitMigration(
        migration="m1", output_token_ids=[4, 5, 6], from_block=2, blocks=[102], computed_tokens=5, read_ms=200
    )


class Target:
    """The migrator of ``b``, asked by hand; its worker answers by hand as well."""

    def __init__(self) -> None:
        config = MigratorConfig(name="migrator-b", instances=["b"], bus=BusConfig(cluster="c"))
        self.metrics = MigratorMetrics()
        self.actor = MigratorActor(config=config, incarnation=1, rng=Random(1), metrics=self.metrics)
        self.now_ns = START_NS
        self.asked: list[Request] = []
        self.replies: list[tuple[str, Body]] = []
        self.published: list[Body] = []
        self.timers: dict[str, int] = {}
        self._count = 0

    def ask(self, body: Body, verb: str) -> str:
        self._count += 1
        to = f"s{self._count}"
        self._take(self.actor.handle(Message(body, f"mr.c.migrate.b.{verb}", "migrator-a", to), self.now_ns))
        return to

    def answer(self, body: Body | RequestFailure, question: int = -1) -> None:
        correlation = self.asked[question].correlation
        reply: Body = (
            RequestFailed(correlation=correlation, reason=body)
            if isinstance(body, RequestFailure)
            else Replied(correlation=correlation, body=body)
        )
        self._take(self.actor.handle(Message(reply), self.now_ns))

    def fire(self, after_ms: int) -> None:
        self.now_ns += after_ms * MS
        due = [name for name, at_ns in self.timers.items() if at_ns <= self.now_ns]
        for name in due:
            del self.timers[name]
            self._take(self.actor.handle(Message(TimerFired(name=name)), self.now_ns))

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Request():
                    self.asked.append(effect)
                case Reply():
                    self.replies.append((effect.to, effect.body))
                case Publish():
                    self.published.append(effect.body)
                case StartTimer():
                    self.timers[effect.name] = effect.at_ns
        self.actor.check_invariants()

    def prepared(self) -> Target:
        self.ask(prepare(), "prepare")
        self.answer(KvReserved(migration="m1", matched_blocks=0, copier=CopierKind.MODELLED))
        return self

    def unreserved(self) -> bool:
        return any(isinstance(body, UnreserveKv) for body in self.published)

    def last(self) -> Any:
        return self.replies[-1][1]


def pulled(first: int = 0) -> KvPulled:
    return KvPulled(
        migration="m1",
        from_block=first,
        blocks=2,
        bytes=20,
        descriptors=1,
        duration_ns=5,
        copier=CopierKind.MODELLED,
        at_ns=77,
    )


def test_the_workers_clock_is_told_to_the_source_and_the_deadlines_by_it_to_the_worker() -> None:
    target = Target()
    target.ask(prepare(), "prepare")
    target.answer(KvReserved(migration="m1", matched_blocks=0, copier=CopierKind.MODELLED, at_ns=66))
    assert target.last().at_ns == 66
    target.ask(msgspec.structs.replace(pull(), until_ns=1_066), "pull")
    assert target.asked[-1].body.until_ns == 1_066  # type: ignore[attr-defined]
    target.answer(pulled())
    assert target.last().at_ns == 77
    target.ask(msgspec.structs.replace(commit(), until_ns=277), "commit")
    submitted = target.asked[-1].body
    assert isinstance(submitted, SubmitSequence)
    assert submitted.handover is not None
    assert submitted.handover.until_ns == 277


def test_a_reservation_is_asked_for_the_whole_sequence() -> None:
    target = Target()
    target.ask(prepare(), "prepare")
    body = target.asked[0].body
    assert isinstance(body, ReserveKv)
    assert (body.token_ids, body.blocks, body.epoch) == ([1, 2, 3, 4], 5, 4)
    assert target.asked[0].subject == "mr.c.engine.b.reserve"


@pytest.mark.parametrize("times", [2, 3])
def test_a_repeated_prepare_reserves_once_and_is_answered_each_time(times: int) -> None:
    target = Target()
    early = [target.ask(prepare(), "prepare") for _ in range(times)]
    target.answer(KvReserved(migration="m1", matched_blocks=1, copier=CopierKind.MODELLED))
    late = target.ask(prepare(), "prepare")
    assert len(target.asked) == 1
    assert [to for to, _ in target.replies] == [*early, late]
    assert all(body == target.last() and isinstance(body, MigrationPrepared) for _, body in target.replies)


def test_a_repeated_pull_reads_once_and_is_answered_each_time() -> None:
    target = Target().prepared()
    first, again = target.ask(pull(), "pull"), target.ask(pull(), "pull")
    target.answer(pulled())
    late = target.ask(pull(), "pull")
    assert sum(isinstance(request.body, PullKv) for request in target.asked) == 1
    assert [to for to, body in target.replies if isinstance(body, BlocksPulled)] == [first, again, late]


def test_a_repeated_commit_submits_once_and_is_answered_each_time() -> None:
    target = Target().prepared()
    first, again = target.ask(commit(), "commit"), target.ask(commit(), "commit")
    target.answer(SequenceAccepted(sequence="r.0", epoch=4))
    late = target.ask(commit(), "commit")
    assert sum(isinstance(request.body, SubmitSequence) for request in target.asked) == 1
    assert [to for to, body in target.replies if isinstance(body, MigrationCommitted)] == [first, again, late]


def test_the_worker_gets_every_token_and_where_the_rest_of_the_kv_is() -> None:
    target = Target().prepared()
    target.ask(commit(), "commit")
    body = target.asked[-1].body
    assert isinstance(body, SubmitSequence)
    assert body.handover is not None
    assert (body.output_token_ids, body.epoch) == ([4, 5, 6], 4)
    assert (body.handover.from_block, body.handover.blocks, body.handover.read_ms) == (2, [102], 200)
    assert body.handover.endpoint == endpoint()


@pytest.mark.parametrize(("body", "verb"), [(pull(), "pull"), (commit(), "commit")])
def test_what_was_never_prepared_is_refused(body: Body, verb: str) -> None:
    target = Target()
    target.ask(body, verb)
    assert target.last().reason is KvRefusal.INVALID
    assert not target.asked


@pytest.mark.parametrize("number", [0, 2, 7])
def test_a_round_out_of_turn_is_refused(number: int) -> None:
    target = Target().prepared()
    target.ask(pull(number), "pull")
    assert target.last().reason is KvRefusal.INVALID


def test_a_commit_amid_a_round_is_refused() -> None:
    target = Target().prepared()
    target.ask(pull(), "pull")
    target.ask(commit(), "commit")
    assert target.last().reason is KvRefusal.INVALID


def test_a_failed_read_ends_it_and_frees_the_room() -> None:
    target = Target().prepared()
    target.ask(pull(), "pull")
    target.answer(RequestFailure.TIMEOUT)
    assert (target.last().reason, target.unreserved()) == (KvRefusal.UNANSWERED, True)
    target.ask(commit(), "commit")
    assert isinstance(target.last(), MigrationRefused)
    assert target.metrics.arrived["unanswered"] == 1


def test_a_worker_that_does_not_take_it_is_told_on() -> None:
    target = Target().prepared()
    target.ask(commit(), "commit")
    target.answer(SequenceRefused(sequence="r.0", epoch=4, reason=RefusalReason.DRAINING, detail="going"))
    assert (target.last().reason, target.last().detail) == (KvRefusal.TARGET_REFUSED, "draining: going")


def test_an_error_of_the_worker_is_a_refusal() -> None:
    target = Target()
    target.ask(prepare(), "prepare")
    target.answer(ErrorReply(reason="unexpected", detail="no"))
    assert target.last().reason is KvRefusal.INVALID


def test_without_news_the_room_is_given_back() -> None:
    target = Target().prepared()
    target.fire(after_ms=1_999)
    assert not target.unreserved()
    target.fire(after_ms=1)
    assert target.unreserved()
    target.ask(pull(), "pull")
    assert target.last().reason is KvRefusal.UNANSWERED


def test_each_round_renews_the_reservation() -> None:
    target = Target().prepared()
    target.fire(after_ms=1_500)
    target.ask(pull(), "pull")
    target.fire(after_ms=900)
    target.answer(pulled())
    target.fire(after_ms=1_900)
    assert not target.unreserved()


def test_an_abort_frees_the_room_and_what_comes_later_is_refused() -> None:
    target = Target().prepared()
    target.ask(AbortMigration(migration="m1", reason=KvRefusal.CANCELLED), "abort")
    assert target.unreserved()
    target.ask(commit(), "commit")
    assert target.last().reason is KvRefusal.CANCELLED


@pytest.mark.parametrize("committed", [False, True])
def test_an_abort_after_the_commit_has_no_effect(committed: bool) -> None:
    target = Target().prepared()
    target.ask(commit(), "commit")
    if committed:
        target.answer(SequenceAccepted(sequence="r.0", epoch=4))
    target.ask(AbortMigration(migration="m1", reason=KvRefusal.UNANSWERED), "abort")
    assert not target.unreserved()


def test_a_late_answer_of_the_worker_says_nothing_any_more() -> None:
    target = Target()
    target.ask(prepare(), "prepare")
    target.ask(AbortMigration(migration="m1", reason=KvRefusal.CANCELLED), "abort")
    before = len(target.replies)
    target.answer(KvReserved(migration="m1", matched_blocks=0, copier=CopierKind.MODELLED))
    assert len(target.replies) == before
    target.ask(prepare(), "prepare")
    assert target.last().reason is KvRefusal.CANCELLED


def test_three_come_at_a_time_and_what_is_over_makes_room() -> None:
    target = Target()
    for number in range(3):
        target.ask(prepare(f"m{number}"), "prepare")
    target.ask(prepare("m3"), "prepare")
    assert target.last().reason is KvRefusal.TOO_MANY
    target.ask(AbortMigration(migration="m0", reason=KvRefusal.CANCELLED), "abort")
    target.ask(prepare("m4"), "prepare")
    assert isinstance(target.asked[-1].body, ReserveKv)
    assert target.asked[-1].body.migration == "m4"


def test_what_is_over_is_forgotten_after_a_while() -> None:
    target = Target().prepared()
    target.ask(AbortMigration(migration="m1", reason=KvRefusal.CANCELLED), "abort")
    target._take(target.actor.start(target.now_ns))
    for _ in range(6):
        target.fire(after_ms=1_000)
    assert target.actor.snapshot()["in"] == {}
