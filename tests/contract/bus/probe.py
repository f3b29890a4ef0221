"""An actor that does what a test tells it and remembers what it got: the same on both buses."""

from collections.abc import Callable
from typing import Any

from millrace.actor.effects import Effect, Stop
from millrace.contracts.local import StopRequested
from millrace.contracts.message import Body, Message
from millrace.sim.stand_in import StandIn

#: From a message and its time to effects.
Rule = Callable[[Message, int], list[Effect]]


class Do(Body, frozen=True, kw_only=True, tag="local.Do/1"):
    """Tells a probe to return these effects."""

    effects: list[Any]


class Probe(StandIn):
    """Returns ``first`` at its start; answers messages by ``rule``; keeps every message with its time."""

    def __init__(self, name: str, *first: Effect, rule: Rule | None = None) -> None:
        self.name = name
        self.got: list[Message] = []
        self.times_ns: list[int] = []
        self._first = list(first)
        self._rule = rule

    def start(self, now_ns: int) -> list[Effect]:
        return self._first

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        if isinstance(message.body, Do):
            return list(message.body.effects)
        if isinstance(message.body, StopRequested):
            return [Stop(reason="asked")]
        self.got.append(message)
        self.times_ns.append(now_ns)
        return self._rule(message, now_ns) if self._rule is not None else []

    def bodies(self, *kinds: type) -> list[Any]:
        """Return the bodies it got, of these types (all where none is named)."""
        return [message.body for message in self.got if not kinds or isinstance(message.body, kinds)]
