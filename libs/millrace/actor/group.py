"""Several actors that run as one: one name on the bus, one process.

Each part is a whole actor and knows nothing of the group. What a part publishes reaches the others at once if they
subscribe to it, and goes to the bus as well. A message goes to the parts that subscribe to its subject, or that watch
its bucket; an answer and a timer go to the part that asked; events of the process (a stop, a reconnection, results of
a shell) go to all, the main part last: it hears what the others make of them. It gives the group its name, and the
group stops when it does.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import Any

import msgspec

from millrace.actor.actor import Actor
from millrace.actor.effects import (
    CancelTimer,
    DeleteKey,
    Effect,
    Gather,
    Publish,
    PutKey,
    Request,
    StartTimer,
    Stop,
    Subscribe,
    WatchKeys,
)
from millrace.contracts.local import (
    BucketReady,
    Gathered,
    KeyChanged,
    KeyNotPut,
    KeyPut,
    KeyUnreadable,
    Replied,
    RequestFailed,
    TimerFired,
)
from millrace.contracts.message import Body, Message
from millrace.contracts.subjects import covers

#: Subjects whose receivers are remembered: a few for each instance of a large cluster.
ROUTES_MAX = 16_384

#: Separates the number of the part that asked from its own correlation or name of a timer.
_MARK = "|"


class ActorGroup:
    """Actors hosted as one."""

    def __init__(self, main: Actor, *others: Actor) -> None:
        self.parts = (main, *others)
        self.name = main.name
        self._patterns: list[tuple[str, int]] = []
        self._watched: dict[str, list[int]] = {}
        self._subscribed: set[tuple[str, str]] = set()
        self._routes: dict[str, tuple[int, ...]] = {}

    def start(self, now_ns: int) -> list[Effect]:
        """First effects of all parts; a subject or bucket that several want is asked for once."""
        begun = [(index, effect) for index, part in enumerate(self.parts) for effect in part.start(now_ns)]
        return self._carried(deque(begun), now_ns)

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for index, own in self._received(message):
            if begun := self.parts[index].handle(own, now_ns):
                effects += self._carried(deque([(index, effect) for effect in begun]), now_ns)
        if effects:
            effects.sort(key=lambda effect: isinstance(effect, Stop))  # stable: Stop is the last one
        return effects

    def _received(self, message: Message) -> list[tuple[int, Message]]:
        """Parts that get a message, each with the message as it knows it."""
        body = message.body
        match body:
            case TimerFired(name=marked):
                index, own = _unmarked(marked)
                return [(index, _with_body(message, msgspec.structs.replace(body, name=own)))]
            case Replied() | RequestFailed() | Gathered() | KeyPut() | KeyNotPut():
                index, own = _unmarked(body.correlation)
                return [(index, _with_body(message, msgspec.structs.replace(body, correlation=own)))]
            case KeyChanged() | KeyUnreadable() | BucketReady():
                indices: tuple[int, ...] = tuple(self._watched.get(body.bucket, ()))
            case _ if message.subject:
                indices = self._route(message.subject)
            case _:
                indices = tuple(range(len(self.parts)))
        if len(indices) > 1 and not indices[0]:
            indices = (*indices[1:], 0)
        return [(index, message) for index in indices]

    def _route(self, subject: str) -> tuple[int, ...]:
        found = self._routes.get(subject)
        if found is None:
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            found = tuple(sorted({index for pattern, index in self._patterns if covers(pattern, subject)}))
            self._routes[subject] = found
        return found

    def _carried(self, todo: deque[tuple[int, Effect]], now_ns: int) -> list[Effect]:
        """Effects for the runtime, once the parts have heard from each other."""
        effects: list[Effect] = []
        while todo:
            index, effect = todo.popleft()
            match effect:
                case Subscribe():
                    self._patterns.append((effect.subject, index))
                    if (effect.subject, effect.queue_group) in self._subscribed:
                        continue
                    self._subscribed.add((effect.subject, effect.queue_group))
                case WatchKeys():
                    known = self._watched.setdefault(effect.bucket, [])
                    insort(known, index)
                    if len(known) > 1:
                        continue
                case StartTimer() | CancelTimer():
                    effect = msgspec.structs.replace(effect, name=_marked(index, effect.name))
                case Request() | Gather() | PutKey() | DeleteKey():
                    effect = msgspec.structs.replace(effect, correlation=_marked(index, effect.correlation))
                case Publish():
                    message = Message(effect.body, effect.subject, self.name, "", effect.traceparent)
                    for other in self._route(effect.subject):
                        if other != index:
                            todo += [(other, each) for each in self.parts[other].handle(message, now_ns)]
                case Stop() if index:
                    continue
                case _:
                    pass
            effects.append(effect)
        return effects

    def snapshot(self) -> dict[str, Any]:
        return {name: value for part in reversed(self.parts) for name, value in part.snapshot().items()}

    def check_invariants(self) -> None:
        for part in self.parts:
            part.check_invariants()


def _marked(index: int, name: str) -> str:
    return f"{index}{_MARK}{name}" if index else name


def _unmarked(name: str) -> tuple[int, str]:
    index, mark, own = name.partition(_MARK)
    return (int(index), own) if mark and index.isdigit() else (0, name)


def _with_body(message: Message, body: Body) -> Message:
    return msgspec.structs.replace(message, body=body)
