"""The actor protocol: a state machine without I/O."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from millrace.actor.effects import Effect
from millrace.contracts.message import Body, Message


class Actor(Protocol):
    """A state machine. Live and simulated runtimes drive the same class.

    Handlers are plain functions that run to completion; slow work is an effect whose result returns as a message.
    Randomness comes
    from an rng and ids from a seeded source given at construction; time is ``now_ns`` (unix ns, never going back)
    and nothing else.
    """

    @property
    def name(self) -> str:
        """Unique name on the bus, for example ``ingress-0``; sent as ``Mr-Sender``."""
        ...

    def start(self, now_ns: int) -> list[Effect]:
        """First effects: subscriptions, watches, timers. Called once, before any message."""
        ...

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """Takes one message; returns what shall happen.

        A body of a type that the actor does not take yields no change; where ``reply_to`` is set it is answered
        with an ErrorReply.
        """
        ...

    def snapshot(self) -> dict[str, Any]:
        """State for people and checkers, made of plain types."""
        ...

    def check_invariants(self) -> None:
        """Raises AssertionError where the state contradicts itself."""
        ...


@runtime_checkable
class TouchChecked(Protocol):
    """An actor whose state is large beside what most messages change.

    The simulation checks all of it after each 16th message only, and after the others what they touched.
    """

    def check_touched(self, body: Body) -> None:
        """Raises AssertionError where what this message may have changed contradicts itself."""
        ...
