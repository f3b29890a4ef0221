"""Record of how a service that ingress asks has answered lately (tagger, predictors, a judge), and what it may ask."""

from __future__ import annotations

from random import Random

from services.ingress.times import SECOND_NS

#: Questions in a row without an answer after which nobody is asked for a while.
FAILURES_MAX = 3
#: Candidates that a placement asks about at least, where the policy drew as many.
ASKED_MIN = 2
#: Forecasts that a pause saves up for a burst, seconds of the rate.
BURST_S = 0.1


class AnswerHealth:
    """Answers and failures of one service.

    Attributes:
        failures: Questions in a row without an answer.
        from_ns: It is not asked before.
        missing: The log says that useful answers are missing, and not yet that they are back.
    """

    __slots__ = ("failures", "from_ns", "missing")

    def __init__(self) -> None:
        self.failures = self.from_ns = 0
        self.missing = False

    def note(self, *, answered: bool, useful: bool, now_ns: int, pause_ns: int) -> str:
        """Count an answer or a failure; returns what the log has to say: ``missing``, ``back`` or nothing."""
        self.failures = 0 if answered else self.failures + 1
        silent = self.failures >= FAILURES_MAX
        if silent:
            self.from_ns = now_ns + pause_ns
        if useful == self.missing and (answered or silent):
            self.missing = not useful
            return "back" if useful else "missing"
        return ""


class ForecastBudget:
    """Forecasts of one model that may be asked for now: beyond them each placement asks about fewer candidates.

    Under overload the policy stays the same and looks at less, instead of giving way to another one. Two candidates are
    always asked about: the better of two random ones is most of what choosing among all gives (Mitzenmacher, "The power
    of two choices", 2001).
    """

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


class PredictorsHealth(AnswerHealth):
    """Record of how the predictors of one model have answered.

    Attributes:
        logged_absurd: The log has shown a prediction that cannot be true.
        budget: Forecasts that may be asked for now.
    """

    __slots__ = ("budget", "logged_absurd")

    def __init__(self) -> None:
        super().__init__()
        self.budget = ForecastBudget()
        self.logged_absurd = False
