"""Receivers of a subject: NATS's matching of wildcards and its queue groups."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from millrace.contracts.subjects import covers

if TYPE_CHECKING:
    from millrace.sim.process import SimProcess

#: Routes are remembered per subject; past this many the memory starts over.
ROUTES_MAX = 100_000


class Subscription:
    """One actor's wish for a subject. Ends with the actor's incarnation."""

    __slots__ = ("ended", "process", "queue_group", "subject")

    def __init__(self, process: SimProcess, subject: str, queue_group: str) -> None:
        self.process = process
        self.subject = subject
        self.queue_group = queue_group
        self.ended = False


class Router:
    """The server's interest table."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._exact: dict[str, dict[Subscription, None]] = {}
        self._wild: dict[str, dict[Subscription, None]] = {}  # by what stands before the first wildcard
        self._routes: dict[str, tuple[list[Subscription], list[list[Subscription]]]] = {}

    def add(self, subscription: Subscription) -> None:
        """Remembers a subscription; adding it twice is no error."""
        if _is_wild(subscription.subject):
            self._wild.setdefault(_literal_head(subscription.subject), {})[subscription] = None
            self._routes.clear()
        else:
            self._exact.setdefault(subscription.subject, {})[subscription] = None
            self._routes.pop(subscription.subject, None)

    def remove(self, subscription: Subscription) -> None:
        """Forgets a subscription; an unknown one is no error."""
        if _is_wild(subscription.subject):
            self._wild.get(_literal_head(subscription.subject), {}).pop(subscription, None)
            self._routes.clear()
        else:
            self._exact.get(subscription.subject, {}).pop(subscription, None)
            self._routes.pop(subscription.subject, None)

    def receivers(self, subject: str) -> list[Subscription]:
        """Everyone who wants it and one of each queue group, drawn at random."""
        route = self._routes.get(subject)
        if route is None:
            route = self._find(subject)
        plain, groups = route
        if not groups:
            return plain
        return plain + [self._rng.choice(members) for members in groups]

    def _find(self, subject: str) -> tuple[list[Subscription], list[list[Subscription]]]:
        wanting = list(self._exact.get(subject, ()))
        tokens = subject.split(".")
        for count in range(len(tokens)):
            heads = self._wild.get(".".join(tokens[:count]), ())
            wanting += [subscription for subscription in heads if covers(subscription.subject, subject)]
        plain: list[Subscription] = []
        groups: dict[str, list[Subscription]] = {}
        for subscription in wanting:
            if subscription.queue_group:
                groups.setdefault(subscription.queue_group, []).append(subscription)
            else:
                plain.append(subscription)
        if len(self._routes) >= ROUTES_MAX:
            self._routes.clear()
        route = plain, list(groups.values())
        self._routes[subject] = route
        return route


def _literal_head(subject: str) -> str:
    """The tokens before the first wildcard: every subject that matches begins with them."""
    tokens = subject.split(".")
    return ".".join(tokens[: next(i for i, token in enumerate(tokens) if token in ("*", ">"))])


def _is_wild(subject: str) -> bool:
    return "*" in subject or ">" in subject
