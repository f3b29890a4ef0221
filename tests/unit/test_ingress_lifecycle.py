"""The transition table of a sequence: complete, reachable, and the only place where the state is set."""

import ast
from pathlib import Path
from typing import get_args

import pytest
from millrace.actor.transitions import TransitionRefused

from services.ingress import lifecycle
from services.ingress.lifecycle import SequenceEvent, SequencePhase
from services.ingress.transitions import TRANSITIONS, react
from tests.unit.ingress_core import Bench

EVENTS = get_args(SequenceEvent)
PAIRS = [(state, event) for state in SequencePhase for event in EVENTS]
INGRESS = Path(lifecycle.__file__).parent


def instance_of(event: type) -> SequenceEvent:
    return event(*(None for _ in event.__struct_fields__))


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if not TRANSITIONS.rows(*pair)])
def test_an_event_that_is_not_listed_is_refused_and_changes_nothing(state, event):
    bench = Bench()
    bench.call()
    sequence = bench.actor.state.sequences["r.0"]
    sequence.phase = state
    with pytest.raises(TransitionRefused, match=f"r.0: {event.__name__}.* while {state.value}"):
        react(bench.actor.state, sequence, instance_of(event))
    assert sequence.phase is state


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


def test_every_event_is_used():
    assert {row.event for row in TRANSITIONS} == set(EVENTS)


def test_nothing_else_sets_the_state():
    setters = []
    for path in sorted(INGRESS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "phase":
                setters.append(path.name)
    assert setters == ["reactions.py", "transitions.py"], "that of cascades, and that of sequences"
