"""An operator in a scenario: gives its orders at their times, and keeps the answers.

| message in | change | messages out |
|---|---|---|
| TimerFired(order/N) | | SetRole or SetInstances |
| Replied | the answer is kept | |
| RequestFailed | no answer: kept as such | |

Overload: it sends as many messages as the scenario has orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.actor.effects import Effect, Request, StartTimer
from millrace.contracts.coordinator import OrderAccepted, OrderRefused, SetRole
from millrace.contracts.local import Replied, RequestFailed, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.subjects import Subjects

from simulator.scenarios.order_spec import OrderSpec

#: A coordinator asks each provisioner twice, for two seconds each.
ANSWER_NS = 10_000_000_000

ACCEPTS = ()


class ScenarioOperator:
    """Owns the answers.

    Attributes:
        answers: In the order in which they came: ``accepted: DETAIL``, ``REASON: DETAIL`` or ``unanswered: WHY``.
    """

    def __init__(self, orders: Sequence[OrderSpec], *, cluster: str, model: str, begin_ns: int) -> None:
        """``model``: where an order names none. ``begin_ns``: from when times count, unix ns."""
        self.name = "operator"
        self.answers: list[str] = []
        self._orders = orders
        self._model = model
        self._begin_ns = begin_ns
        self._subjects = Subjects(cluster)

    def start(self, now_ns: int) -> list[Effect]:
        """Sets a timer for each order."""
        times = (self._begin_ns + int(order.at_s * 1e9) for order in self._orders)
        return [StartTimer(name=f"order/{index}", at_ns=max(now_ns, at_ns)) for index, at_ns in enumerate(times)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """See the table above."""
        match message.body:
            case TimerFired(name=name):
                return [self._order(int(name.partition("/")[2]))]
            case Replied(body=OrderAccepted(detail=detail)):
                self.answers.append(f"accepted: {detail}")
            case Replied(body=OrderRefused(reason=reason, detail=detail)):
                self.answers.append(f"{reason}: {detail}")
            case RequestFailed(reason=reason):
                self.answers.append(f"unanswered: {reason}")
            case _:
                pass
        return []

    def _order(self, index: int) -> Effect:
        body = self._orders[index].body(self._model)
        verb = "role" if isinstance(body, SetRole) else "scale"
        return Request(
            subject=self._subjects.coordinate(body.model, verb),
            body=body,
            correlation=f"order/{index}",
            timeout_ns=ANSWER_NS,
        )

    def snapshot(self) -> dict[str, Any]:
        """Answers so far."""
        return {"answers": self.answers}

    def check_invariants(self) -> None:
        """At most one answer each."""
        assert len(self.answers) <= len(self._orders)
