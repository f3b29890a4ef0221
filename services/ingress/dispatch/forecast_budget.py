"""Bound of the forecasts that one ingress asks for per second: beyond it each placement asks about fewer candidates.

Under overload the policy stays the same and looks at less, instead of giving way to another one. Two candidates are
always asked about: the better of two random ones is most of what choosing among all gives (Mitzenmacher, "The power of
two choices", 2001).
"""

from __future__ import annotations

from random import Random

from services.ingress.times import SECOND_NS

#: Candidates that a placement asks about at least, where the policy drew as many.
ASKED_MIN = 2
#: Forecasts that a pause saves up for a burst, seconds of the rate.
BURST_S = 0.1


class ForecastBudget:
    """Forecasts of one model that may be asked for now."""

    __slots__ = ("_at_ns", "_spare")

    def __init__(self) -> None:
        self._spare = -1.0  # full at the first question
        self._at_ns = 0

    def take(self, drawn: tuple[str, ...], per_s: float, now_ns: int, rng: Random) -> tuple[str, ...]:
        """Those of the drawn candidates that may be asked about, in their order; ``per_s`` 0 is no bound."""
        if not per_s:
            return drawn
        full = per_s * BURST_S
        refilled = self._spare + (now_ns - self._at_ns) * per_s / SECOND_NS
        spare = full if self._spare < 0 else min(full, refilled)
        count = min(len(drawn), max(ASKED_MIN, int(spare)))
        self._spare, self._at_ns = max(0.0, spare - count), now_ns
        if count == len(drawn):
            return drawn
        return tuple(drawn[index] for index in sorted(rng.sample(range(len(drawn)), count)))
