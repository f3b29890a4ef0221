"""Transition tables: rows by state and event, guards in order, and tables that cannot be meant."""

from enum import Enum

import pytest
from millrace.actor.transitions import Transition, TransitionRefused, TransitionTable


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
