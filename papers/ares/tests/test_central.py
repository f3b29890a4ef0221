"""The scheduler in one place: whom it moves, and what it counts."""

from __future__ import annotations

from millrace.actor.effects import Request
from millrace.contracts.broker import MoveReason
from millrace.contracts.local import Replied, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrateSequence, MigrationFinished, MigrationOutcome
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot

from papers.ares.central import CentralAres, Parameters
from tests.testbed.messages import plain_snapshot

SECOND = 1_000_000_000


def status(name: str, generated: int, *, prompt: int = 100, expected: int | None = None) -> SequenceStatus:
    total = prompt + generated
    running = SequenceState.RUNNING
    return SequenceStatus(name, running, prompt, total, generated, 32_000, -(-total // 16), 0, expected)


def snapshot(name: str, *running: SequenceStatus, at_ns: int = 10 * SECOND) -> StatusSnapshot:
    return plain_snapshot(
        name,
        step=5,
        at_ns=at_ns,
        running=list(running),
        blocks_free=1_000,
        blocks_total=2_000,
        step_duration_ns=20_000_000,
    )


def central(*snapshots: StatusSnapshot) -> CentralAres:
    actor = CentralAres(Parameters(), cluster="sim", block_size={"a": 16, "b": 16})
    for body in snapshots:
        actor.handle(Message(body=body), 10 * SECOND)
    return actor


def tick(actor: CentralAres, now_ns: int = 10 * SECOND) -> list[MigrateSequence]:
    effects = actor.handle(Message(body=TimerFired(name="tick")), now_ns)
    return [each.body for each in effects if isinstance(each, Request) and isinstance(each.body, MigrateSequence)]


LONG = [status(f"r{n}.0", 3_000, expected=9_000) for n in range(4)]


def test_central_ares_moves_one_sequence_from_the_loaded_instance_and_not_twice():
    actor = central(snapshot("a", *LONG), snapshot("b"))
    first, again = tick(actor), tick(actor)
    assert [move.target for move in (*first, *again)] == ["b", "b"]
    assert first[0].sequence != again[0].sequence


def test_central_ares_counts_how_moves_ended_and_may_move_the_sequence_again():
    actor = central(snapshot("a", *LONG[:1], status("r9.0", 3_000, expected=9_000)), snapshot("b"))
    moved = tick(actor)[0].sequence
    finished = MigrationFinished(
        migration="m1",
        sequence=moved,
        model="m",
        source="a",
        target="b",
        outcome=MigrationOutcome.ABORTED,
        reason=MoveReason.ORDER,
        epoch=1,
    )
    actor.handle(Message(body=Replied(correlation=moved, body=finished)), 10 * SECOND)
    assert actor.results == {"aborted": 1}
    assert tick(actor)[0].sequence == moved


def test_central_ares_does_not_act_on_old_snapshots():
    assert tick(central(snapshot("a", *LONG), snapshot("b")), now_ns=20 * SECOND) == []
