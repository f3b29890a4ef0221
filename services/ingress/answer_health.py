"""Record of how a service that ingress asks has answered lately: tagger, predictors, a judge."""

from __future__ import annotations

#: Questions in a row without an answer after which nobody is asked for a while.
FAILURES_MAX = 3


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
