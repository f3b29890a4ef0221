"""Links between nodes and the bus: delay, loss, duplication and reordering, drawn from one seeded source.

A healthy link is a TCP connection: it keeps order. Faults are what a sequence of broken connections, overrun buffers
and retries can look like from above, and worse, since nothing above may rely on more than at-most-once delivery.
"""

from __future__ import annotations

from random import Random

import msgspec


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """How a link behaves, in each direction.

    Attributes:
        delay_ns: Least delay.
        jitter_ns: Mean of an exponential delay on top; 0 for a constant delay.
        loss: Share of messages that never arrive, 0 to 1.
        duplicate: Share that arrives twice.
        reorder: Share that is held back and lets later ones pass.
        hold_ns: Longest time that a reordered or duplicated one is held back.
    """

    delay_ns: int = 100_000
    jitter_ns: int = 0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    hold_ns: int = 20_000_000

    @property
    def is_faulty(self) -> bool:
        return self.loss > 0 or self.duplicate > 0 or self.reorder > 0


class Link:
    """One direction of a node's connection.

    Attributes:
        faulty: Whether ``arrivals`` may be none, several or out of order; else ``arrival`` says the same for less.
    """

    __slots__ = ("_last_ns", "_model", "_rng", "faulty")

    def __init__(self, model: LinkModel, rng: Random) -> None:
        self._rng = rng
        self._last_ns = 0
        self.change(model)

    def change(self, model: LinkModel) -> None:
        """Behaves like ``model`` from now on; what is under way stays as it was drawn."""
        self._model = model
        self.faulty = model.is_faulty

    def arrival(self, now_ns: int) -> int:
        """When something that is never lost arrives: after everything sent before it."""
        model = self._model
        at_ns = now_ns + model.delay_ns
        if model.jitter_ns:
            at_ns += int(self._rng.expovariate(1.0) * model.jitter_ns)
        if at_ns <= self._last_ns:
            at_ns = self._last_ns + 1
        self._last_ns = at_ns
        return at_ns

    def arrivals(self, now_ns: int) -> tuple[int, ...]:
        """When copies of one message arrive: none where it is lost."""
        if not self.faulty:
            return (self.arrival(now_ns),)
        model, rng = self._model, self._rng
        if rng.random() < model.loss:
            return ()
        held = rng.random() < model.reorder
        first_ns = now_ns + model.delay_ns + rng.randrange(model.hold_ns) if held else self.arrival(now_ns)
        if rng.random() < model.duplicate:
            return first_ns, first_ns + 1 + rng.randrange(model.hold_ns)
        return (first_ns,)
