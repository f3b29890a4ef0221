"""Delivery between actors of one runtime: by reference, at once, without the server.

What a local subscription matches is handed over here. Then:

- A message that wants an answer, and one that a local member of a queue group takes, stays in the process.
- Any other message goes to the server as well, for everybody else; the connection asks the server for no echo.
- An actor with a role may do what that role's permissions allow, as if it had a connection of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

from millrace.actor.cell import Cell
from millrace.contracts.message import Body, Message
from millrace.contracts.subjects import covers

#: Subjects whose receivers are remembered; more than a large cluster has of those that an ingress publishes to.
ROUTES_MAX = 4096

#: Hands a body to an actor, or refuses it there.
HandOver = Callable[[Cell, Message], None]


@dataclass(slots=True, eq=False)
class LocalRoute:
    """Receivers of one subject.

    Attributes:
        shared: Members of each queue group, in turn.
        every: Those that subscribe for themselves.
        alone: The only receiver, of a queue group; None where there is no such one.
    """

    shared: tuple[Iterator[Cell], ...]
    every: tuple[Cell, ...]
    alone: Cell | None = None


_NOBODY = LocalRoute((), ())


class LocalBus:
    """Subscriptions of all actors of one runtime."""

    def __init__(self, hand_over: HandOver) -> None:
        self._hand_over = hand_over
        self._subscriptions: dict[tuple[str, str], tuple[str, Cell]] = {}
        self._routes: dict[str, LocalRoute] = {}

    def subscribe(self, cell: Cell, subject: str, queue_group: str) -> None:
        """Begins a subscription; an actor has one per subject."""
        self._subscriptions[(cell.name, subject)] = (queue_group, cell)
        self._routes.clear()

    def unsubscribe(self, cell: Cell, subject: str) -> None:
        """Ends one; unknown ones are no error."""
        if self._subscriptions.pop((cell.name, subject), None) is not None:
            self._routes.clear()

    def take(self, sender: Cell, subject: str, body: Body, *, reply: str = "", traceparent: str = "") -> bool:
        """Hands a message to all local receivers; returns whether that was all, and the server needs none."""
        route = self._routes.get(subject) or self._find(subject)
        if route is _NOBODY:
            return False
        message = Message(body, subject, sender.name, reply, traceparent)
        for members in route.shared:
            self._hand_over(next(members), message)
        for cell in route.every:
            self._hand_over(cell, message)
        return bool(reply or route.shared)

    def answerer(self, subjects: tuple[str, ...]) -> Cell | None:
        """The actor that alone receives what is asked on any of these subjects; None where there is no such one."""
        found = None
        for subject in subjects:
            alone = (self._routes.get(subject) or self._find(subject)).alone
            if alone is None or alone is not (found or alone):
                return None
            found = alone
        return found

    def _find(self, subject: str) -> LocalRoute:
        groups: dict[str, list[Cell]] = {}
        every: list[Cell] = []
        for (_, pattern), (group, cell) in self._subscriptions.items():
            if not covers(pattern, subject):
                continue
            if group:
                groups.setdefault(group, []).append(cell)
            else:
                every.append(cell)
        members = [cell for cells in groups.values() for cell in cells]
        alone = members[0] if len(members) == 1 and not every else None
        route = LocalRoute(tuple(map(cycle, groups.values())), tuple(every), alone) if members or every else _NOBODY
        if len(self._routes) >= ROUTES_MAX:
            self._routes.clear()
        self._routes[subject] = route
        return route
