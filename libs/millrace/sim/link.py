"""One direction of a link, with everything drawn from one seeded source."""

from __future__ import annotations

from random import Random

from millrace.sim.links import LinkModel


class SimLink:
    """One direction of a node's connection.

    Attributes:
        faulty: Whether ``arrivals`` may be none, several or out of order; else ``arrival`` says the same for less.
    """

    __slots__ = ("_delay_ns", "_jitter_ns", "_last_ns", "_model", "_rng", "faulty")

    def __init__(self, model: LinkModel, rng: Random) -> None:
        self._rng = rng
        self._last_ns = 0
        self.change(model)

    def change(self, model: LinkModel) -> None:
        """Behaves like ``model`` from now on; what is under way stays as it was drawn."""
        self._model = model
        self._delay_ns, self._jitter_ns = model.delay_ns, model.jitter_ns
        self.faulty = model.is_faulty

    def arrival(self, now_ns: int) -> int:
        """Return the arrival time of something that is never lost: after everything sent before it."""
        at_ns = now_ns + self._delay_ns
        if self._jitter_ns:
            at_ns += int(self._rng.expovariate(1.0) * self._jitter_ns)
        if at_ns <= self._last_ns:
            at_ns = self._last_ns + 1
        self._last_ns = at_ns
        return at_ns

    def arrivals(self, now_ns: int) -> tuple[int, ...]:
        """Return the arrival times of the copies of one message; empty if it is lost."""
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
