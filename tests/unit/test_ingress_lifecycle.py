"""The transition table of a sequence: complete, reachable, and the only place where the state is set."""

import ast
from pathlib import Path
from typing import get_args

import pytest
from millrace.actor.transitions import TransitionRefused

from services.ingress import lifecycle
from services.ingress.lifecycle import (
    TRANSITIONS,
    Cancelled,
    ForecastsReceived,
    ForecastsRequested,
    Guard,
    Reaction,
    SequenceEvent,
    SequencePhase,
    SubmissionRefused,
)
from services.ingress.reactions import REACTIONS
from services.ingress.sequence import OpenSequence
from tests.unit.ingress_core import Bench
from tests.unit.test_ingress_moving_fuzz import SEEDS, run

EVENTS = get_args(SequenceEvent)
PAIRS = [(state, event) for state in SequencePhase for event in EVENTS]
INGRESS = Path(lifecycle.__file__).parent


def sequence_in(state: SequencePhase) -> OpenSequence:
    """A sequence that is forced into a state, which only a test may do."""
    bench = Bench()
    bench.call()
    sequence = bench.actor.state.sequences["r.0"]
    sequence._phase = state
    return sequence


def instance_of(event: type) -> SequenceEvent:
    return event(*(None for _ in event.__struct_fields__))


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_event_is_a_listed_transition_or_is_refused(state, event):
    rows = TRANSITIONS.rows(state, event)
    for truth in (True, False):
        sequence = sequence_in(state)
        if not rows:
            with pytest.raises(TransitionRefused, match=f"r.0: {event.__name__}.* while {state.value}"):
                sequence.advance(instance_of(event), lambda guard, truth=truth: truth)
            assert sequence.phase is state
            continue
        reaction = sequence.advance(instance_of(event), lambda guard, truth=truth: truth)
        row = rows[0] if truth else rows[-1]
        assert (reaction, sequence.phase) == (row.reaction, row.target)


def test_every_state_is_reached_from_the_first_one():
    reached, new = set(), {SequencePhase.WAITING}
    while new:
        reached |= new
        new = {row.target for row in TRANSITIONS if row.state in reached} - reached
    assert reached == set(SequencePhase)


def test_every_state_but_the_terminal_one_can_end():
    terminal = [state for state in SequencePhase if not any(TRANSITIONS.rows(state, event) for event in EVENTS)]
    assert terminal == [SequencePhase.ENDED]
    ending = {SequencePhase.ENDED}
    for _ in SequencePhase:
        ending |= {row.state for row in TRANSITIONS if row.target in ending}
    assert ending == set(SequencePhase)


def test_every_event_and_reaction_is_used_and_bound():
    assert {row.event for row in TRANSITIONS} == set(EVENTS)
    assert {row.reaction for row in TRANSITIONS} == set(Reaction) == set(REACTIONS)
    assert {row.guard for row in TRANSITIONS} == {*Guard, None}


def test_nothing_else_sets_the_state():
    setters = []
    for path in sorted(INGRESS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in ("phase", "_phase"):
                setters.append(path.name)
    assert setters == ["open_cascade.py"] * 2 + ["sequence.py"] * 2, "the constructors and `advance`"


#: Its policy asks no predictor, its workers refuse nothing, and nobody leaves within the one answer of a target.
NOT_IN_THE_FUZZ = {
    (SequencePhase.WAITING, ForecastsRequested),
    (SequencePhase.FORECASTING, ForecastsReceived),
    (SequencePhase.FORECASTING, Cancelled),
    (SequencePhase.SUBMITTED, SubmissionRefused),
    (SequencePhase.VERIFYING, Cancelled),
}


def test_the_fuzz_of_migrations_fires_every_other_event_in_every_state():
    taken = {pair for seed in SEEDS for pair in run(seed).bench.transitions.taken}
    missing = {(row.state, row.event) for row in TRANSITIONS} - taken - NOT_IN_THE_FUZZ
    assert not missing
