"""Transition tables: which event leads from which state to which other one, and what is to be done then.

A table is a constant of the module that describes a life cycle; one function looks an event up and assigns the state,
nothing else does:

    MIGRATIONS = TransitionTable[MigrationState, type[MigrationEvent], Guard, Reaction](
        Transition(_S.PREPARING, Prepared, _S.COPYING, pull),
        Transition(_S.COPYING, Pulled, _S.FREEZING, freeze, guard=is_last_round),  # tried first
        Transition(_S.COPYING, Pulled, _S.COPYING, pull),
        Transition(_S.COPYING, Aborted, _S.ENDED, release),
    )

    def react(migration: Migration, event: MigrationEvent) -> None:
        row = MIGRATIONS.take(migration.state, type(event), lambda guard: guard(migration, event), who=migration.id)
        migration.state = row.target
        row.reaction(migration, event)

Events are types, as here, or members of an enumeration. Rows of one state and event are tried in the order in which
they stand; each but the last has a guard, which the table checks when it is made. What a reaction and a guard mean is
the caller's: its own functions, or enumerations where the table stands below what it calls. A table that ignores some
events asks with ``rows``, which is empty for those; ``take`` refuses them, as an event that cannot happen is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event")
Guard = TypeVar("Guard")
Reaction = TypeVar("Reaction")


class TransitionRefused(AssertionError):
    """The table lists no transition for this state and event: a bug in whoever caused the event."""


@dataclass(frozen=True, slots=True)
class Transition(Generic[State, Event, Guard, Reaction]):
    """One row: ``event`` in ``state`` leads to ``target`` where ``guard`` holds (None: always)."""

    state: State
    event: Event
    target: State
    reaction: Reaction
    guard: Guard | None = None


class TransitionTable(Generic[State, Event, Guard, Reaction]):
    """The rows of one life cycle, indexed by state and event."""

    def __init__(self, *rows: Transition[State, Event, Guard, Reaction]) -> None:
        self._all = rows
        self._index: dict[Any, tuple[Transition[State, Event, Guard, Reaction], ...]] = {}
        for row in rows:
            self._index[row.state, row.event] = (*self.rows(row.state, row.event), row)
        for (state, event), found in self._index.items():
            guards = [row.guard for row in found]
            assert None not in guards[:-1], f"{state}, {event}: a row after one without a guard is never tried"
            assert guards[-1] is None, f"{state}, {event}: the last row must have no guard"
            assert len(set(guards)) == len(guards), f"{state}, {event}: the same guard twice"

    def __iter__(self) -> Iterator[Transition[State, Event, Guard, Reaction]]:
        return iter(self._all)

    def rows(self, state: State, event: Event) -> tuple[Transition[State, Event, Guard, Reaction], ...]:
        """Rows of a state and an event in the order in which they are tried; empty where there is none."""
        return self._index.get((state, event), ())

    def take(
        self, state: State, event: Event, holds: Callable[[Guard], bool], *, who: str
    ) -> Transition[State, Event, Guard, Reaction]:
        """The first row whose guard holds. Raises TransitionRefused, naming ``who``, where the table lists none."""
        for row in self._index.get((state, event), ()):
            if row.guard is None or holds(row.guard):
                return row
        raise TransitionRefused(f"{who}: {getattr(event, '__name__', event)} while {state.value}")
