"""Transition tables: rows by state and event, guards in order, tables that cannot be meant; and that of a sequence."""

import ast
from enum import Enum
from pathlib import Path
from typing import get_args

import pytest
from millrace.actor.transitions import Transition, TransitionRefused, TransitionTable

from services.ingress import lifecycle
from services.ingress.cascade.lifecycle import CascadeEvent
from services.ingress.cascade.reactions import CASCADE_TRANSITIONS
from services.ingress.lifecycle import SequenceEvent
from services.ingress.transitions import TRANSITIONS


class Door(Enum):
    OPEN = "open"
    SHUT = "shut"


DOOR = TransitionTable(
    Transition(Door.SHUT, "push", Door.SHUT, "rattle", guard="locked"),
    Transition(Door.SHUT, "push", Door.OPEN, "swing"),
    Transition(Door.OPEN, "pull", Door.SHUT, "swing"),
)


def test_the_first_row_whose_guard_holds_is_taken():
    asked = []
    for locked, reaction, target in ((True, "rattle", Door.SHUT), (False, "swing", Door.OPEN)):
        row = DOOR.take(Door.SHUT, "push", lambda guard, locked=locked: asked.append(guard) or locked, who="door")
        assert (row.reaction, row.target) == (reaction, target)
    assert asked == ["locked", "locked"]


def test_an_event_that_is_not_listed_has_no_rows_and_is_refused_by_name():
    assert DOOR.rows(Door.OPEN, "push") == ()
    with pytest.raises(TransitionRefused, match="door: push while open"):
        DOOR.take(Door.OPEN, "push", lambda guard: True, who="door")


@pytest.mark.parametrize(
    ("guards", "said"),
    [((None, "locked"), "never tried"), (("locked",), "no guard"), (("locked", "locked", None), "twice")],
)
def test_a_table_that_cannot_be_meant_is_refused(guards, said):
    rows = [Transition(Door.SHUT, "push", Door.OPEN, "swing", guard=guard) for guard in guards]
    with pytest.raises(AssertionError, match=said):
        TransitionTable(*rows)


@pytest.mark.parametrize(("rows", "events"), [(TRANSITIONS, SequenceEvent), (CASCADE_TRANSITIONS, CascadeEvent)])
def test_every_event_of_a_table_is_used_and_nothing_leaves_ended(rows, events):
    assert {row.event for row in rows} == set(get_args(events))
    assert all(row.state.name != "ENDED" for row in rows)


def test_nothing_else_sets_a_sequence_s_state():
    setters = []
    for path in sorted(Path(lifecycle.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "phase":
                setters.append(path.name)
    assert setters == ["reactions.py", "transitions.py"], "that of cascades, and that of sequences"
