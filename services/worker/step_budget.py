"""Token budget of the engine's steps, as the coordinator orders it for a while.

| message in | change | effects |
|---|---|---|
| SetStepBudget | the order in force | LimitStepInEngine where the bound changes; a timer for its end |
| the timer | the engine's own budget, unless the order was repeated | LimitStepInEngine |

Invariant: without an order in force the engine has its own budget.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Log, StartTimer
from millrace.actor.engine import LimitStepInEngine
from millrace.contracts.scheduler import step_budget
from millrace.contracts.status import EngineDescription
from millrace.contracts.worker import SetStepBudget

TIMER = "step_budget"

#: An order lasts no longer than this: whoever gives it repeats it while its reason lasts.
VALID_MS_MAX = 60_000


class StepBudget:
    """Sole owner of the order in force.

    Attributes:
        tokens: Bound of a step; 0 for the engine's own budget.
        ignored: Orders that were meant for another incarnation, or made no sense.
    """

    def __init__(self, info: EngineDescription, incarnation: int) -> None:
        self._info = info
        self._incarnation = incarnation
        self._until_ns = 0
        self._last = (0, 0)  # the bound before, and when it ended
        self.tokens = 0
        self.ignored = 0

    def order(self, body: SetStepBudget, now_ns: int) -> list[Effect]:
        """Takes an order. One for another incarnation, or with values out of range, is counted and ignored."""
        if body.incarnation != self._incarnation or body.tokens < 0 or not 0 < body.valid_ms <= VALID_MS_MAX:
            self.ignored += 1
            return []
        if not body.tokens:
            return self._change(0, "ordered", now_ns)
        began = not self._until_ns
        self._until_ns = now_ns + body.valid_ms * 1_000_000
        bound = step_budget(self._info, body.tokens)
        changed = self._change(bound if bound < self._info.token_budget else 0, "ordered", now_ns, ends=False)
        return [*changed, StartTimer(name=TIMER, at_ns=self._until_ns)] if began else changed

    def on_timer(self, now_ns: int) -> list[Effect]:
        """Ends an order that was not repeated."""
        if not self._until_ns:
            return []
        if now_ns < self._until_ns:
            return [StartTimer(name=TIMER, at_ns=self._until_ns)]
        return self._change(0, "the order was not repeated", now_ns)

    def since(self, at_ns: int) -> int:
        """The last bound in force after a time; 0 for none."""
        tokens, ended_ns = self._last
        return self.tokens or (tokens if ended_ns > at_ns else 0)

    def _change(self, tokens: int, why: str, now_ns: int, *, ends: bool = True) -> list[Effect]:
        if ends:
            self._until_ns = 0
        if tokens == self.tokens:
            return []
        began = not (tokens and self.tokens)
        self._last = (self.tokens, now_ns)
        self.tokens = tokens
        fields = {"tokens": tokens or self._info.token_budget, "why": why}
        told: list[Effect] = [Log(level="info", event="step_budget", fields=fields)] if began else []
        return [LimitStepInEngine(tokens=tokens), *told]
