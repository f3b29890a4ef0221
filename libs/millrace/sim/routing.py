"""Receivers of a subject: NATS's matching of wildcards and its queue groups."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from millrace.contracts.subjects import covers

if TYPE_CHECKING:
    from millrace.sim.process import SimProcess

#: Routes are remembered per subject; past this many the memory starts over.
ROUTES_MAX = 100_000


@dataclass(slots=True, eq=False)
class Subscription:
    """One actor's wish for a subject. Ends with the actor's incarnation."""

    process: SimProcess
    subject: str
    queue_group: str
    ended: bool = False


class Router:
    """The server's interest table.

    Wildcards are found by what they begin and end with, and routes are forgotten by the same: with a thousand
    instances ``status.*.<instance>`` stands there a thousand times, and comes and goes while migrations run.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._count = 0
        self._exact: dict[str, dict[Subscription, None]] = {}
        self._wild: dict[tuple[str, str], dict[Subscription, int]] = {}  # by head and tail: when each was added
        self._routes: dict[str, tuple[list[Subscription], list[list[Subscription]]]] = {}
        self._known: dict[str, dict[str, set[str]]] = {}  # subjects with a route, by their kind and last token

    def add(self, subscription: Subscription) -> None:
        """Remembers a subscription; adding it twice is no error."""
        subject = subscription.subject
        if _is_wild(subject):
            self._count += 1
            self._wild.setdefault(_ends(subject), {}).setdefault(subscription, self._count)
            self._forget(subject)
        else:
            self._exact.setdefault(subject, {})[subscription] = None
            self._routes.pop(subject, None)

    def remove(self, subscription: Subscription) -> None:
        """Forgets a subscription; an unknown one is no error."""
        subject = subscription.subject
        if _is_wild(subject):
            self._wild.get(_ends(subject), {}).pop(subscription, None)
            self._forget(subject)
        else:
            self._exact.get(subject, {}).pop(subscription, None)
            self._routes.pop(subject, None)

    def _forget(self, pattern: str) -> None:
        """Forgets the routes of all subjects that a pattern may match."""
        head, tail = _ends(pattern)
        kind = _kind(head.split("."))
        if not kind:
            self._clear()
            return
        known = self._known.get(kind, {})
        for last in [tail] if tail else list(known):
            for subject in known.pop(last, ()):
                self._routes.pop(subject, None)

    def _clear(self) -> None:
        self._routes.clear()
        self._known.clear()

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
        tokens = subject.split(".")
        plain: list[Subscription] = []
        groups: dict[str, list[Subscription]] = {}
        for subscription in self._wanting(subject, tokens):
            if subscription.queue_group:
                groups.setdefault(subscription.queue_group, []).append(subscription)
            else:
                plain.append(subscription)
        if len(self._routes) >= ROUTES_MAX:
            self._clear()
        route = plain, list(groups.values())
        self._routes[subject] = route
        self._known.setdefault(_kind(tokens), {}).setdefault(tokens[-1], set()).add(subject)
        return route

    def _wanting(self, subject: str, tokens: list[str]) -> list[Subscription]:
        """Subscriptions that match: exact ones, then by length of what stands before the wildcard, then by age."""
        wanting = list(self._exact.get(subject, ()))
        for count in range(len(tokens)):
            head = ".".join(tokens[:count])
            some = {**self._wild.get((head, ""), {}), **self._wild.get((head, tokens[-1]), {})}
            matching = [each for each in some if covers(each.subject, subject)]
            wanting += sorted(matching, key=some.__getitem__)
        return wanting


#: Tokens that tell the kind of a subject: ``mr.<cluster>.<kind>``.
KIND_TOKENS = 3


def _kind(tokens: list[str]) -> str:
    """Empty for what is too short to tell."""
    return ".".join(tokens[:KIND_TOKENS]) if len(tokens) >= KIND_TOKENS else ""


def _ends(subject: str) -> tuple[str, str]:
    """The tokens before the first wildcard, and the last token; empty where that is a wildcard."""
    tokens = subject.split(".")
    first = next(i for i, token in enumerate(tokens) if token in ("*", ">"))
    return ".".join(tokens[:first]), "" if tokens[-1] in ("*", ">") else tokens[-1]


def _is_wild(subject: str) -> bool:
    return "*" in subject or ">" in subject
