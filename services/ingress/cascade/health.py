"""Record of how a judge has answered."""

from __future__ import annotations

#: Failures in a row after which the judge is not asked for a while.
JUDGE_FAILURES_MAX = 3


class JudgeHealth:
    """Failures of one cascade's judge.

    Attributes:
        failures: Questions in a row without a usable answer.
        from_ns: It is not asked before.
        logged_missing: The log says that judgements are missing, and not yet that they are back.
    """

    __slots__ = ("failures", "from_ns", "logged_missing")

    def __init__(self) -> None:
        self.failures = 0
        self.from_ns = 0
        self.logged_missing = False

    def note(self, *, answered: bool, now_ns: int, pause_ns: int) -> str:
        """Count an answer or a failure; returns the log event due: ``judge_missing``, ``judge_back`` or none."""
        self.failures = 0 if answered else self.failures + 1
        if self.failures >= JUDGE_FAILURES_MAX:
            self.from_ns = now_ns + pause_ns
            if not self.logged_missing:
                self.logged_missing = True
                return "judge_missing"
        elif answered and self.logged_missing:
            self.logged_missing = False
            return "judge_back"
        return ""
