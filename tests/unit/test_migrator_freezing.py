"""Time that a source stands still: what its worker allows, whatever the migrator is set to."""

import pytest
from millrace.actor.effects import Log
from millrace.contracts.leases import EndLease, FreezeSequence
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrationMode, MigrationOutcome

from services.migrator.config import MigratorLimits
from tests.unit.migrator_rig import MS, Rig, endpoint, record

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


def test_a_live_migration_too_asks_for_no_more_than_is_allowed() -> None:
    rig = slow_target(MigrationMode.LIVE, answer_ms=100, freeze_ms_max=150)
    rig.migrate(target="b")
    assert {body.freeze_ms for body in rig.published(FreezeSequence)} == {150}


def test_a_worker_that_tells_no_bound_gets_what_is_set() -> None:
    rig = slow_target(MigrationMode.RECOMPUTE, answer_ms=1, freeze_ms_max=0)
    rig.migrate(target="b")
    assert {body.freeze_ms for body in rig.published(FreezeSequence)} == {MigratorLimits().copy_freeze_ms}


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
