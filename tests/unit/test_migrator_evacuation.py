"""Sequences that leave an instance without being named: evacuations, and handoffs of prefill instances."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import LeaseKv, PrepareMigration
from millrace.contracts.migration import (
    EvacuateInstance,
    InstanceEvacuated,
    MigrationFinished,
    MigrationOutcome,
    MigrationReason,
)
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import SequenceStatus, StatusSnapshot

from tests.unit.migrator_rig import FakeWorker, Rig


def evacuate(rig: Rig, run_ms: int = 4_000, limit_ms: int = 10_000) -> InstanceEvacuated | None:
    rig.ask("a", EvacuateInstance(limit_ms=limit_ms), "evacuate")
    rig.run(run_ms)
    found = [body for body in rig.answers if isinstance(body, InstanceEvacuated)]
    return found[-1] if found else None


def changed(worker: FakeWorker, sequence: str, **changes: Any) -> None:
    """Its snapshots say something else of one sequence."""
    told = worker.snapshot

    def snapshot(now_ns: int) -> StatusSnapshot:
        body = told(now_ns)
        running: list[SequenceStatus] = [
            msgspec.structs.replace(status, **changes) if status.sequence == sequence else status
            for status in body.running
        ]
        return msgspec.structs.replace(body, running=running)

    worker.snapshot = snapshot  # type: ignore[method-assign]


def test_everything_moves_to_where_there_is_room_three_at_a_time() -> None:
    rig = Rig("a", "b", "c")
    for name in "bc":
        rig.workers[name].blocks_free = 1_000
    for index in range(8):
        rig.decode("a", f"r.{index}")
    answer = evacuate(rig)
    assert answer is not None
    assert (answer.moved, answer.left) == (8, 0)
    assert not rig.workers["a"].sequences
    assert {len(rig.workers[name].sequences) for name in "bc"} != {0}
    assert {body.reason for body in rig.published(MigrationFinished)} == {MigrationReason.DRAIN}


def test_an_empty_instance_is_evacuated_at_once() -> None:
    answer = evacuate(Rig("a", "b"), run_ms=800)
    assert answer == InstanceEvacuated(instance="a", moved=0, failed=0, left=0)


def test_where_nobody_else_is_there_is_nothing_to_wait_for() -> None:
    rig = Rig("a")
    rig.decode("a")
    answer = evacuate(rig, run_ms=10)
    assert answer is not None
    assert answer.moved == 0


def test_a_cluster_that_goes_down_as_a_whole_does_not_wait_for_room() -> None:
    rig = Rig("a", "b")
    rig.decode("a")
    rig.workers["b"].draining = True
    rig.run(100)
    rig.hear()
    answer = evacuate(rig, run_ms=700)
    assert answer is not None
    assert (answer.moved, answer.left) == (0, 1)


def test_what_cannot_be_carried_stays_and_is_counted() -> None:
    rig = Rig("a", "b")
    rig.decode("a", "r.0")
    rig.decode("a", "r.1")
    changed(rig.workers["a"], "r.0", immovable="a grammar")
    answer = evacuate(rig)
    assert answer is not None
    assert (answer.moved, answer.left) == (1, 1)


def test_a_target_without_room_is_tried_again_until_the_limit() -> None:
    rig = Rig("a", "b")
    rig.workers["b"].blocks_free = 2
    rig.decode("a")
    assert evacuate(rig, run_ms=900, limit_ms=2_000) is None
    rig.workers["b"].blocks_free = 80
    rig.run(1_000)
    answer = rig.answers[-1]
    assert isinstance(answer, InstanceEvacuated)
    assert answer.moved == 1


def test_the_limit_holds_whatever_is_left() -> None:
    rig = Rig("a", "b")
    rig.decode("a")
    rig.workers["b"].refuse[PrepareMigration] = KvRefusal.NO_BLOCKS
    answer = evacuate(rig, run_ms=700, limit_ms=600)
    assert answer is not None
    assert answer.left == 1


def test_a_second_evacuation_joins_the_first() -> None:
    rig = Rig("a", "b")
    rig.decode("a")
    rig.ask("a", EvacuateInstance(limit_ms=5_000), "evacuate")
    evacuate(rig)
    assert len([body for body in rig.answers if isinstance(body, InstanceEvacuated)]) == 2
    assert sum(body.outcome is MigrationOutcome.MOVED for body in rig.published(MigrationFinished)) == 1


def test_one_whose_prompt_is_not_done_waits_until_it_is() -> None:
    rig = Rig("a", "b")
    rig.decode("a")
    worker = rig.workers["a"]
    plain = worker.snapshot
    changed(worker, "r.0", output_tokens=0)
    assert evacuate(rig, run_ms=800) is None
    assert not rig.published(LeaseKv)
    worker.snapshot = plain  # type: ignore[method-assign]
    rig.run(1_000)
    assert "r.0" in rig.workers["b"].sequences


def test_a_stopping_migrator_answers_the_evacuation() -> None:
    rig = Rig("a", "b")
    rig.decode("a")
    rig.workers["b"].blocks_free = 0
    rig.ask("a", EvacuateInstance(limit_ms=5_000), "evacuate")
    rig.run(500)
    rig.stop("a")
    rig.run(10)
    assert isinstance(rig.answers[-1], InstanceEvacuated)


# handoffs


def test_a_prefill_instance_hands_each_sequence_over_after_its_first_token() -> None:
    rig = Rig("a", "b", "c")
    rig.plan(a=InstanceRole.PREFILL, b=InstanceRole.DECODE)
    rig.decode("a", outputs=1)
    rig.run(600)
    assert "r.0" in rig.workers["b"].sequences, "one that only decodes comes before one that does both"
    finished = rig.published(MigrationFinished)[0]
    assert finished.reason is MigrationReason.HANDOFF


def test_it_goes_to_one_that_does_both_where_no_decode_instance_has_room() -> None:
    rig = Rig("a", "b", "c")
    rig.workers["b"].blocks_free = 3
    rig.plan(a=InstanceRole.PREFILL, b=InstanceRole.DECODE)
    rig.decode("a", outputs=1)
    rig.run(600)
    assert "r.0" in rig.workers["c"].sequences


def test_without_room_anywhere_it_decodes_where_it_is_and_is_tried_again() -> None:
    rig = Rig("a", "b")
    rig.workers["b"].blocks_free = 3
    rig.run(100)
    rig.plan(a=InstanceRole.PREFILL, b=InstanceRole.DECODE)
    rig.decode("a", outputs=1)
    rig.run(1_500)
    assert "r.0" in rig.workers["a"].sequences
    assert not rig.published(LeaseKv), "its engine is not bothered for nothing"
    rig.workers["b"].blocks_free = 500
    rig.run(600)
    assert "r.0" in rig.workers["b"].sequences


def test_nothing_is_handed_to_another_prefill_instance() -> None:
    rig = Rig("a", "b")
    rig.plan(a=InstanceRole.PREFILL, b=InstanceRole.PREFILL)
    rig.decode("a", outputs=1)
    rig.run(1_000)
    assert "r.0" in rig.workers["a"].sequences


@pytest.mark.parametrize("role", [InstanceRole.DECODE, InstanceRole.BOTH])
def test_other_roles_keep_what_they_have(role: InstanceRole) -> None:
    rig = Rig("a", "b")
    rig.plan(a=role)
    rig.decode("a", outputs=1)
    rig.run(1_000)
    assert not rig.published(LeaseKv)


def test_a_role_that_is_taken_back_ends_the_handing_over() -> None:
    rig = Rig("a", "b")
    rig.plan(a=InstanceRole.PREFILL, b=InstanceRole.DECODE)
    rig.run(500)
    rig.plan()
    rig.decode("a", outputs=1)
    rig.run(1_000)
    assert not rig.published(LeaseKv)
