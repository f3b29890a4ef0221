"""Handoffs that nobody takes: asked less and less often, at once again where room comes, told once."""

from __future__ import annotations

from random import Random

import pytest
from millrace.actor.effects import Log
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import LeaseKv, PrepareMigration
from millrace.contracts.message import Message
from millrace.contracts.migration import EvacuateInstance, MigrationFinished, MigrationOutcome
from millrace.contracts.plan import InstanceRole
from millrace.policies.migration.backoff import (
    JITTER,
    PAUSE_NS,
    PAUSE_NS_MAX,
    QUIET_NS,
    REST_NS,
    REST_NS_MAX,
    SLOT_PAUSE_NS_MAX,
    MoveBackoff,
    RefusedMove,
)

from tests.unit.migrator_rig import START_NS, Rig

NOW = 10**12


def refused(
    reason: KvRefusal = KvRefusal.NO_BLOCKS, *, sequence: str = "r.0", need: int = 10, room: int = 5
) -> RefusedMove:
    return RefusedMove(sequence=sequence, reason=reason, need=need, room=room)


def pauses(reason: KvRefusal, count: int) -> list[int]:
    """Return the pauses of an instance that is refused several times in a row; its one sequence rests meanwhile."""
    back, now, spans = MoveBackoff(), NOW, []
    for _ in range(count):
        assert back.refused(refused(reason), Random(1), now)
        assert back.pause is not None
        spans.append(back.pause.until_ns - now)
        now = back.pause.until_ns
    return spans


def test_each_rest_is_twice_as_long_up_to_a_bound() -> None:
    back, now = MoveBackoff(), NOW
    for count in range(8):
        back.refused(refused(), Random(count), now)
        whole = min(REST_NS_MAX, REST_NS << count)
        until = back.rests["r.0"].until_ns
        assert whole * (1 - JITTER) <= until - now <= whole
        assert back.is_resting("r.0", until - 1)
        assert not back.is_resting("r.0", until)
        now = until


@pytest.mark.parametrize(
    ("reason", "longest"), [(KvRefusal.NO_BLOCKS, PAUSE_NS_MAX), (KvRefusal.TOO_MANY, SLOT_PAUSE_NS_MAX)]
)
def test_an_instance_pauses_twice_as_long_each_time_up_to_a_bound(reason: KvRefusal, longest: int) -> None:
    spans = pauses(reason, 9)
    assert PAUSE_NS * (1 - JITTER) <= spans[0] <= PAUSE_NS
    assert spans[1] > spans[0]
    assert longest * (1 - JITTER) <= spans[-1] <= longest


def test_those_that_are_refused_together_are_one_refusal_of_the_instance() -> None:
    back = MoveBackoff()
    assert back.refused(refused(sequence="r.0"), Random(1), NOW)
    assert not back.refused(refused(sequence="r.1"), Random(1), NOW + 1)
    assert back.pause is not None
    assert back.pause.refusals == 1
    assert back.free(3, NOW + 2) == 0


def test_after_a_pause_one_is_asked_for_and_each_that_moves_allows_one_more() -> None:
    back = MoveBackoff()
    assert back.free(3, NOW) == 3
    back.refused(refused(), Random(1), NOW)
    later = NOW + PAUSE_NS
    assert back.free(3, later) == 1
    for allowed in (2, 3, 3):
        back.moved("r.9", later)
        assert back.free(3, later) == allowed


def test_room_that_grows_by_what_is_needed_ends_rest_and_pause_early() -> None:
    back = MoveBackoff()
    back.refused(refused(need=10, room=40), Random(1), NOW)
    assert not back.look({"r.0"}, 49, NOW + 1), "the same room led to a refusal"
    assert not back.look({"r.0"}, 3, NOW + 2)
    assert not back.look({"r.0"}, 12, NOW + 3)
    assert back.is_resting("r.0", NOW + 3)
    assert back.look({"r.0"}, 13, NOW + 4)
    assert not back.is_resting("r.0", NOW + 4)
    assert back.free(3, NOW + 4) == 1


@pytest.mark.parametrize("reason", [KvRefusal.TOO_MANY, KvRefusal.UNANSWERED, KvRefusal.INCOMPATIBLE])
def test_room_says_nothing_of_what_was_not_refused_for_lack_of_it(reason: KvRefusal) -> None:
    back = MoveBackoff()
    back.refused(refused(reason), Random(1), NOW)
    assert not back.look({"r.0"}, 10_000, NOW + 1)
    assert back.is_resting("r.0", NOW + 1)


def test_who_is_gone_is_forgotten_when_its_rest_is_over_and_who_is_there_is_not() -> None:
    back = MoveBackoff()
    back.refused(refused(sequence="r.0"), Random(1), NOW)
    back.refused(refused(sequence="r.1"), Random(1), NOW)
    back.look({"r.1"}, 0, NOW + 1)
    assert set(back.rests) == {"r.0", "r.1"}
    back.look({"r.1"}, 0, NOW + REST_NS)
    assert set(back.rests) == {"r.1"}
    back.refused(refused(sequence="r.1"), Random(1), NOW + REST_NS)
    assert back.rests["r.1"].refusals == 2


def test_trouble_is_told_when_it_begins_and_when_it_has_been_over_for_a_while() -> None:
    back = MoveBackoff()
    assert [back.note(NOW + at) for at in (0, 1, 2)] == [True, False, False]
    assert back.over(NOW + 2 + QUIET_NS - 1) is None
    trouble = back.over(NOW + 2 + QUIET_NS)
    assert trouble is not None
    assert trouble.refused == 3
    assert back.over(NOW + 2 * QUIET_NS) is None
    assert back.note(NOW + 3 * QUIET_NS)


# in a migrator


class Prefill(Rig):
    """``a`` hands off to ``b``, which says no; keeps what a's migrator logs."""

    def __init__(self, refusal: KvRefusal | None, *, sequences: int = 6, blocks_free: int = 2_000) -> None:
        self.lines: list[Log] = []
        super().__init__("a", "b")
        self.workers["b"].blocks_free = blocks_free
        if refusal is not None:
            self.workers["b"].refuse[PrepareMigration] = refusal
        self.plan(a=InstanceRole.PREFILL, b=InstanceRole.DECODE)
        self.run(400)  # so that summaries are listened to
        for index in range(sequences):
            self.decode("a", f"r.{index}", outputs=1)

    def deliver(self, name: str, message: Message) -> None:
        if name not in self.stopped:
            effects = self.migrators[name].handle(message, self.now_ns)
            self.lines += [effect for effect in effects if isinstance(effect, Log)]
            self._carry(name, effects)

    def events(self) -> list[str]:
        return [line.event for line in self.lines]


@pytest.mark.parametrize("refusal", [KvRefusal.NO_BLOCKS, KvRefusal.TOO_MANY])
def test_a_target_that_says_no_is_asked_less_and_less(refusal: KvRefusal) -> None:
    rig = Prefill(refusal)
    asked = []
    for _ in range(4):
        before = len(rig.published(PrepareMigration))
        rig.run(2_000)
        asked.append(len(rig.published(PrepareMigration)) - before)
    assert asked[0] > 3
    assert asked[3] <= asked[0] / 2
    assert sum(asked) < 70, "six sequences every quarter of a second were 190"
    assert {body.refusal for body in rig.published(MigrationFinished)} == {refusal}, "the reason is the target's"


def test_nobody_else_means_no_second_lease() -> None:
    rig = Prefill(KvRefusal.NO_BLOCKS, sequences=1)
    rig.run(200)
    assert len(rig.published(LeaseKv)) == len(rig.published(PrepareMigration)) == 1


def test_it_is_told_once_and_once_more_when_it_is_over() -> None:
    rig = Prefill(KvRefusal.NO_BLOCKS)
    rig.run(5_000)
    refusals = len(rig.published(MigrationFinished))
    (line,) = rig.lines
    assert (line.event, line.fields["instance"], line.fields["refusal"]) == ("handoffs_refused", "a", "no_blocks")
    rig.workers["b"].refuse.clear()
    rig.run(16_000)
    assert rig.events().count("migration_finished") == 6
    assert rig.lines[-1].event == "handoffs_resumed"
    assert rig.lines[-1].fields["refused"] >= refusals
    assert len(rig.lines) == 8


def test_metrics_count_pauses_by_reason_and_those_that_room_has_cut_and_who_rests() -> None:
    rig = Prefill(KvRefusal.NO_BLOCKS)
    rig.run(3_000)
    metrics = rig.migrators["a"]._outgoing._context.metrics
    assert metrics.handoff_pauses["no_blocks"] >= 3
    assert metrics.handoff_pauses_cut == 0
    assert dict(metrics.resting())["a"] >= 1
    rig.workers["b"].blocks_free = 10_000
    rig.run(100)
    assert metrics.handoff_pauses_cut >= 1


def test_room_that_comes_ends_the_waiting_long_before_its_time() -> None:
    rig = Prefill(KvRefusal.NO_BLOCKS, sequences=1)
    rests = rig.migrators["a"]._managed["a"].backoff.rests
    while "r.0" not in rests or rests["r.0"].until_ns - rig.now_ns < REST_NS_MAX // 2:
        rig.run(50)
        rests = rig.migrators["a"]._managed["a"].backoff.rests
        assert rig.now_ns - START_NS < 60 * 10**9, "it never rests for long"
    rig.workers["b"].refuse.clear()
    rig.workers["b"].blocks_free += 10_000
    rig.run(200)
    assert "r.0" in rig.workers["b"].sequences


def test_an_evacuation_waits_for_nothing_that_handoffs_wait_for() -> None:
    rig = Prefill(KvRefusal.NO_BLOCKS, sequences=2)
    rig.run(6_000)
    rig.workers["b"].refuse.clear()
    rig.ask("a", EvacuateInstance(limit_ms=5_000), "evacuate")
    rig.run(600)
    assert not rig.workers["a"].sequences


def test_those_that_begin_together_fit_side_by_side() -> None:
    rig = Prefill(None, sequences=3, blocks_free=40)  # 11 blocks each, and 4 to grow
    rig.run(400)
    outcomes = [body.outcome for body in rig.published(MigrationFinished)]
    assert MigrationOutcome.REFUSED not in outcomes
