"""Intents of a broker: a sequence that has just come is left alone before its move has ended."""

import msgspec
import pytest
from millrace.contracts.broker import MoveReason
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import SequenceState, SequenceStatus

from services.broker.config import FenceConfig
from services.broker.intents import PAYBACK_NS_MAX, IntentView, movable, past_boundary, standing_intents

FENCES = FenceConfig()


def view(*, arriving: set[str], draining: bool = False) -> IntentView:
    status = SequenceStatus("r1.0", SequenceState.RUNNING, 100, 299, 200, 1_000, 19, 0, 900)
    return IntentView(
        sequences=[status],
        role=InstanceRole.BOTH,
        draining=draining,
        boundary=128,
        reasons=tuple(MoveReason),
        histories={},
        past_ns={},
        arriving=arriving,
        step_ns=10_000_000,
        move_ns=50_000_000,
        now_ns=10**18,
    )


@pytest.mark.parametrize("reason", [MoveReason.BALANCE, MoveReason.MEMORY])
def test_a_sequence_that_is_arriving_is_not_offered(reason: MoveReason) -> None:
    assert [each.sequence for each in movable(view(arriving=set()), reason, (), FENCES)] == ["r1.0"]
    assert movable(view(arriving={"r1.0"}), reason, (), FENCES) == []


def test_of_a_drain_the_longest_leave_first_and_those_last_that_are_about_to_end() -> None:
    one = view(arriving=set(), draining=True)
    (status,) = one.sequences
    statuses = [
        msgspec.structs.replace(
            status,
            sequence=name,
            prompt_tokens=prompt,
            output_tokens=100,
            max_tokens=1000,
            expected_output_tokens=whole,
        )
        for name, prompt, whole in (("soon", 900, 105), ("short", 10, 700), ("long", 800, None), ("outrun", 300, 90))
    ]
    drained = standing_intents(msgspec.structs.replace(one, sequences=statuses), FENCES)
    assert [each.status.sequence for each in drained] == ["long", "outrun", "short", "soon"]


def test_it_does_not_leave_at_the_boundary_but_it_does_drain() -> None:
    assert [each.reason for each in standing_intents(view(arriving=set()), FENCES)] == [MoveReason.BOUNDARY]
    assert standing_intents(view(arriving={"r1.0"}), FENCES) == []
    drained = standing_intents(view(arriving={"r1.0"}, draining=True), FENCES)
    assert [each.reason for each in drained] == [MoveReason.DRAIN]


@pytest.mark.parametrize(("output", "leaves"), [(889, False), (890, True)])
def test_it_leaves_at_the_boundary_itself(output: int, leaves: bool) -> None:
    one = view(arriving=set())
    status = msgspec.structs.replace(one.sequences[0], output_tokens=output, expected_output_tokens=None)
    staged = msgspec.structs.replace(one, sequences=[status], boundary=890 + status.prompt_tokens)
    assert bool(standing_intents(staged, FENCES)) is leaves


def test_a_rest_that_is_predicted_short_for_seconds_does_not_keep_it_past_its_boundary() -> None:
    one = view(arriving=set())
    soon = msgspec.structs.replace(one.sequences[0], expected_output_tokens=one.sequences[0].output_tokens + 1)
    known = past_boundary([soon], 128, {}, one.now_ns)
    held = msgspec.structs.replace(one, sequences=[soon], past_ns=known)
    assert standing_intents(held, FENCES) == []
    later_ns = one.now_ns + PAYBACK_NS_MAX
    late = msgspec.structs.replace(held, now_ns=later_ns, past_ns=past_boundary([soon], 128, known, later_ns))
    assert [each.reason for each in standing_intents(late, FENCES)] == [MoveReason.BOUNDARY]


def test_below_the_boundary_the_time_past_it_begins_anew() -> None:
    (status,) = view(arriving=set()).sequences
    known = past_boundary([status], 128, {}, 5)
    assert known == {"r1.0": 5}
    assert past_boundary([status], 1_000, known, 7) == {}
    assert past_boundary([status], None, known, 7) == {}
    assert past_boundary([status], 128, {}, 9) == {"r1.0": 9}
