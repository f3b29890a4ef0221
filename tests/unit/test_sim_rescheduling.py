"""Additions to scenarios for rescheduling: estimates with a head's error, central ARES, and the figures of balance."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from millrace.actor.effects import Request
from millrace.contracts.local import Replied, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrateSequence, MigrationFinished, MigrationOutcome, MigrationReason
from millrace.contracts.status import BatchComposition, SequenceState, SequenceStatus, StatusSnapshot

from simulator.scenarios.central_ares import CentralAres
from simulator.scenarios.central_spec import CentralSpec
from simulator.scenarios.head_estimates import HeadEstimates, HeadSpec
from simulator.scenarios.reading import ScenarioError, scenario_of

SECOND = 1_000_000_000


def status(name: str, generated: int, *, prompt: int = 100, expected: int | None = None) -> SequenceStatus:
    total = prompt + generated
    running = SequenceState.RUNNING
    return SequenceStatus(name, running, prompt, total, generated, 32_000, -(-total // 16), 0, expected)


def errors(generated: int, length: int, spec: HeadSpec, count: int = 2_000) -> np.ndarray:
    """Of the logarithm of one plus the rest, of many sequences."""
    head, at = HeadEstimates(spec, seed=1), generated - generated % spec.every
    told = [head.told(status(f"r{n}.0", generated), length) for n in range(count)]
    assert {each.expected_at for each in told} == {at}
    return np.array([math.log1p(each.expected_output_tokens - at) - math.log1p(length - at) for each in told])


@pytest.mark.parametrize(("generated", "sigma"), [(10, 0.72), (40, 1.08), (3_000, 1.15)])
def test_the_error_of_estimates_is_as_wide_as_the_head_was_measured_to_have(generated, sigma):
    # Lengths in the middle of the bounds, so that few estimates are cut.
    found = errors(generated, generated + 600, msgspec.structs.replace(HeadSpec()))
    assert found.std() == pytest.approx(sigma, rel=0.06)
    assert abs(found.mean()) < 0.08


def test_errors_of_a_sequence_change_slowly_and_do_not_depend_on_where_it_is_asked():
    spec = HeadSpec()
    at_500, at_1000 = errors(500, 2_000, spec), errors(1_000, 2_500, spec)
    assert 0.5 < np.corrcoef(at_500, at_1000)[0, 1] < 0.9
    assert (errors(500, 2_000, spec) == at_500).all()


def test_estimates_keep_their_order_and_the_bound_of_the_request():
    head = HeadEstimates(HeadSpec(), seed=3)
    for number in range(300):
        told = head.told(status(f"r{number}.0", 31_000), 31_900)
        assert told.expected_at < told.expected_output_tokens <= told.expected_p90 <= 32_000


def test_a_sequence_without_output_is_told_as_it_is():
    plain = status("r1.0", 0, expected=50)
    assert HeadEstimates(HeadSpec(), seed=3).told(plain, 500) is plain


@pytest.mark.parametrize(
    "fields",
    [{"every": 0}, {"generated": (1, 8)}, {"sigmas": (1.0,)}, {"correlation": 1.5}, {"spread": -1.0}],
)
def test_a_head_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match=r"must|sigmas"):
        HeadSpec(**fields)


def snapshot(name: str, *running: SequenceStatus, at_ns: int = 10 * SECOND) -> StatusSnapshot:
    return StatusSnapshot(
        instance=name,
        incarnation=1,
        model="m",
        step=5,
        at_ns=at_ns,
        running=list(running),
        waiting=[],
        blocks_free=1_000,
        blocks_total=2_000,
        preemptions=0,
        step_duration_ns=20_000_000,
        batch=BatchComposition(),
    )


def central(*snapshots: StatusSnapshot) -> CentralAres:
    actor = CentralAres(CentralSpec(on=True), cluster="sim", block_size={"a": 16, "b": 16})
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
    assert first[0].reason is MigrationReason.SCHEDULER


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
        reason=MigrationReason.SCHEDULER,
        epoch=1,
    )
    actor.handle(Message(body=Replied(correlation=moved, body=finished)), 10 * SECOND)
    assert actor.results == {"aborted": 1}
    assert tick(actor)[0].sequence == moved


def test_central_ares_does_not_act_on_old_snapshots():
    assert tick(central(snapshot("a", *LONG), snapshot("b")), now_ns=20 * SECOND) == []


def test_central_ares_and_balance_between_brokers_exclude_each_other():
    with pytest.raises(ScenarioError, match=r"trading.central: excludes balance"):
        scenario_of({"trading": {"on": True, "policy": "ares", "central": {"on": True}}})
