"""Orders of an operator to have more or fewer instances: what provisioners have answered, and the answer.

Part of the coordinator's provisioning. One operator's order becomes several to provisioners; it is answered when the
last of those is. Owns the operator's orders that wait for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.actor.effects import Effect, Reply
from millrace.contracts.coordinator import OrderAccepted, OrderRefusal, OrderRefused
from millrace.contracts.provisioner import ProvisionRefusal

from services.coordinator.fleet import Order

#: Operators' orders that wait at once; further ones are refused.
WAITING_MAX = 64

#: What provisioners say, in an operator's words.
REFUSALS = {
    str(ProvisionRefusal.UNKNOWN_SHAPE): OrderRefusal.UNKNOWN_SHAPE,
    str(ProvisionRefusal.AT_BOUND): OrderRefusal.NO_DEVICE,
}


@dataclass(kw_only=True)
class WaitingScale:
    """One operator's order.

    Attributes:
        reply_to: Who waits.
        open: Orders to provisioners without an answer yet.
        limit_ms: The longest drain of those that end.
        refused: Outcome and words of those that nobody carries out.
    """

    reply_to: str
    open: set[str]
    limit_ms: int = 0
    starting: list[str] = field(default_factory=list)
    stopping: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


class ScaleOrders:
    """Sole owner of operators' orders under way."""

    def __init__(self) -> None:
        self._waiting: dict[str, WaitingScale] = {}

    @property
    def full(self) -> bool:
        """Whether no more are taken."""
        return len(self._waiting) >= WAITING_MAX

    def begin(self, name: str, waiting: WaitingScale) -> None:
        """Waits for the answers about an operator's order."""
        self._waiting[name] = waiting

    def accepted(self, order: Order) -> list[Effect]:
        """A provisioner carries one out."""
        waiting = self._waiting.get(order.waiter)
        if waiting is None:
            return []
        (waiting.starting if order.action == "start" else waiting.stopping).append(order.instance)
        return self._answered(order, waiting)

    def failed(self, order: Order, outcome: str, detail: str) -> list[Effect]:
        """Nobody carries one out."""
        waiting = self._waiting.get(order.waiter)
        if waiting is None:
            return []
        waiting.refused.append((outcome, detail))
        return self._answered(order, waiting)

    def _answered(self, order: Order, waiting: WaitingScale) -> list[Effect]:
        waiting.open.discard(order.name)
        if waiting.open:
            return []
        del self._waiting[order.waiter]
        return [Reply(to=waiting.reply_to, body=_answer(waiting))] if waiting.reply_to else []

    def check(self) -> None:
        """Raises AssertionError where a bound does not hold."""
        assert len(self._waiting) <= WAITING_MAX


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
