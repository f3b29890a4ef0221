"""Log of orders: who ordered what, and when, for every order that an operator may give, in one file of the cluster.

| message in | change | messages out |
|---|---|---|
| an order on its channel, or ChangeAdapter | when it was heard last | WriteOrder, unless it is a repetition |
| KeyChanged(cascade) | the plan's thresholds | WriteOrder where an operator set them |
| BucketReady | plans from now on are new | |
| StopRequested | | Stop |

It only listens: whoever carries an order out answers it. Services give some of these orders, too (a provisioning policy
drains an instance; a draining worker asks for evacuation) and are logged by their names. What the sender says of itself
is not proven; that it may order at all, NATS checks. Orders that come while no supervisor runs are missed.
Overload: an order that is repeated (answers get lost, drains are told again each second) is one line in REPEAT_NS.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Stop, Subscribe, WatchKeys
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.catalog import CHANNELS, Role
from millrace.contracts.local import BucketReady, KeyChanged, StopRequested
from millrace.contracts.message import Body, Message
from millrace.contracts.provisioner import UpdateCluster
from millrace.contracts.subjects import Subjects

#: An order that is heard again within this time is the same one.
REPEAT_NS = 2_000_000_000

#: Orders that are remembered for that; of more a repetition is a line of its own.
HEARD_MAX = 1_000

#: Channels on which operators order, and adapters by HTTP; what asks all who know is a question.
ORDERS = [c for c in CHANNELS if c.name == "adapter" or (Role.OPERATOR in c.senders and not c.gathers)]
ACCEPTS = tuple({channel.message for channel in ORDERS})


class WriteOrder(Effect, frozen=True, kw_only=True):
    """Appends a line of JSON to the log of orders: its time and these fields."""

    at_ns: int
    fields: dict[str, Any]


class OrderLog:
    """Owns what was ordered a moment ago, and the thresholds of each cascade."""

    def __init__(self, cluster: str) -> None:
        self.name = "order-log"
        self._prefix = Subjects(cluster).prefix
        self._heard_ns: dict[tuple[str, str, bytes], int] = {}
        self._thresholds: dict[str, list[float]] = {}
        self._read = False

    def start(self, now_ns: int) -> list[Effect]:
        subjects = (f"{self._prefix}.{re.sub(r'{.*?}', '*', channel.subject)}" for channel in ORDERS)
        return [*(Subscribe(subject=subject) for subject in subjects), WatchKeys(bucket="cascade")]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case StopRequested():
                return [Stop(reason="the cluster stops")]
            case BucketReady():
                self._read = True
                return []
            case KeyChanged(value=CascadePlan() as plan):
                return self._on_plan(plan, now_ns)
            case UpdateCluster(take=False, processes=[]):
                return []  # a question: what differs?
            case Body() as body if isinstance(body, ACCEPTS):
                return self._on_order(message, now_ns)
            case _:
                return []

    def _on_plan(self, plan: CascadePlan, now_ns: int) -> list[Effect]:
        thresholds = [tier.threshold for tier in plan.tiers]
        before = self._thresholds.get(plan.cascade)
        self._thresholds[plan.cascade] = thresholds
        if not self._read or plan.coordinator != Role.OPERATOR or thresholds == before:
            return []  # it was there before, a planner's, or only its instances changed
        fields = {"cascade": plan.cascade, "thresholds": thresholds, "reason": plan.reason}
        return [_written(now_ns, Role.OPERATOR, "CascadePlan", f"cascade {plan.cascade}", fields)]

    def _on_order(self, message: Message, now_ns: int) -> list[Effect]:
        fields = msgspec.to_builtins(message.body)
        kind, subject = fields.pop("type").partition("/")[0], message.subject.removeprefix(f"{self._prefix}.")
        # All instances get an adapter at once; the time that is left to drain differs each time.
        same = subject if kind == "DrainWorker" else msgspec.json.encode(fields).decode()
        key = message.sender, kind, same.encode()
        recent = [each for each in self._heard_ns.items() if now_ns - each[1] < REPEAT_NS]
        self._heard_ns = dict(recent[-HEARD_MAX:])
        repeated, self._heard_ns[key] = key in self._heard_ns, now_ns
        return [] if repeated else [_written(now_ns, message.sender, kind, subject, fields)]

    def snapshot(self) -> dict[str, Any]:
        return {"heard": len(self._heard_ns), "thresholds": self._thresholds}

    def check_invariants(self) -> None:
        """None beyond its types."""


def _written(now_ns: int, who: str, what: str, where: str, fields: dict[str, Any]) -> WriteOrder:
    return WriteOrder(at_ns=now_ns, fields={"who": who, "what": what, "to": where, **fields})
