"""An operator's order to have more or fewer instances, until the orders to provisioners that it became are answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.actor.effects import Effect, Reply
from millrace.contracts.coordinator import OrderAccepted, OrderRefusal, OrderRefused

#: What provisioners say, in an operator's words.
REFUSALS = {
    str(OrderRefusal.UNKNOWN_SHAPE): OrderRefusal.UNKNOWN_SHAPE,
    str(OrderRefusal.AT_BOUND): OrderRefusal.NO_DEVICE,
}


@dataclass(kw_only=True)
class WaitingScale:
    """One operator's order.

    Attributes:
        open: Orders to provisioners without an answer yet.
        limit_ms: The longest drain of those that end.
        refused: Outcome and words of those that nobody carries out.
    """

    reply_to: str
    open: set[str] = field(default_factory=set)
    limit_ms: int = 0
    starting: list[str] = field(default_factory=list)
    stopping: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def accepted(self, name: str, action: str, instance: str) -> list[Effect]:
        (self.starting if action == "start" else self.stopping).append(instance)
        return self._answered(name)

    def failed(self, name: str, outcome: str, detail: str) -> list[Effect]:
        self.refused.append((outcome, detail))
        return self._answered(name)

    def _answered(self, name: str) -> list[Effect]:
        self.open.discard(name)
        return [Reply(to=self.reply_to, body=_answer(self))] if self.reply_to and not self.open else []


def _answer(waiting: WaitingScale) -> OrderAccepted | OrderRefused:
    done = waiting.starting or waiting.stopping
    if not done:
        outcome, detail = waiting.refused[0]
        return OrderRefused(reason=REFUSALS.get(outcome, OrderRefusal.NOT_KEPT), detail=f"{outcome}: {detail}")
    parts = [f"{', '.join(waiting.starting)} begins"] if waiting.starting else []
    if waiting.stopping:
        parts.append(f"{', '.join(waiting.stopping)} drains, empty within {waiting.limit_ms / 1000:.1f} s")
    parts += [f"one more not ({outcome}: {detail})" for outcome, detail in waiting.refused]
    return OrderAccepted(
        detail="; ".join(parts),
        starting=waiting.starting,
        stopping=waiting.stopping,
        limit_ms=waiting.limit_ms if waiting.stopping else 0,
    )
