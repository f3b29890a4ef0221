"""Instances of ours for which a broker decides what leaves them."""

from __future__ import annotations

from millrace.contracts.status import PresenceState, ServicePresence
from millrace.membership import ServiceLiveness

#: Role of presences that name instances they act for.
BROKER = "broker"


class Delegation:
    """Brokers by instance, from their presences. A broker that was not heard for ``silence_ns`` acts for nobody."""

    def __init__(self, *, silence_ns: int) -> None:
        self._silence_ns = silence_ns
        self._brokers = ServiceLiveness()
        self._broker_of: dict[str, str] = {}

    def on_presence(self, body: ServicePresence, instances: set[str], now_ns: int) -> None:
        """A broker announces itself, leaves, or died. ``instances``: those that matter here."""
        if body.role != BROKER or not body.name or body.incarnation < self._brokers.incarnation(body.name):
            return
        if body.state is not PresenceState.ALIVE:
            self._brokers.lost(body.name)
            return
        self._brokers.renewed(body.name, body.incarnation)
        self._brokers.heard(body.name, now_ns)
        for instance in instances.intersection(body.instances):
            self._broker_of[instance] = body.name
        for instance in [name for name, broker in self._broker_of.items() if broker == body.name]:
            if instance not in body.instances:
                del self._broker_of[instance]

    def restart_timers(self, now_ns: int) -> None:
        """Our connection is back: silence so far was ours."""
        self._brokers.restart_timers(now_ns)

    def broker_of(self, instance: str, now_ns: int) -> str | None:
        """The broker that acts for an instance; None where none was heard lately."""
        broker = self._broker_of.get(instance)
        if broker is None or not self._brokers.is_heard(broker, now_ns, silence_ns=self._silence_ns):
            return None
        return broker
