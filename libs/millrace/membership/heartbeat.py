"""The presence that every service publishes once a second."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.actor.effects import Effect, Publish, StartTimer
from millrace.contracts.local import TimerFired
from millrace.contracts.status import (
    DrainedInstance,
    InstanceMigrations,
    MigrationStatus,
    PresenceState,
    ServicePresence,
)
from millrace.contracts.subjects import Subjects

#: Interval between presences. A receiver calls a service silent after several of these.
HEARTBEAT_NS = 1_000_000_000
FIRST = TimerFired(name="heartbeat")


class Heartbeat:
    """Builds the presences of one service process."""

    def __init__(
        self,
        *,
        subjects: Subjects,
        role: str,
        name: str,
        incarnation: int,
        url: str = "",
        instances: Sequence[str] = (),
        host: str = "",
    ) -> None:
        """Args: as the fields of ``ServicePresence``."""
        self._subject = subjects.presence(role, name)
        self._fixed = ServicePresence(
            role=role, name=name, incarnation=incarnation, at_ns=0, url=url, instances=list(instances), host=host
        )

    def presence(
        self,
        now_ns: int,
        state: PresenceState = PresenceState.ALIVE,
        *,
        moving: Sequence[InstanceMigrations] = (),
        migrations: Sequence[MigrationStatus] = (),
        drained: Sequence[DrainedInstance] = (),
        trouble: str = "",
        store: str = "",
    ) -> Publish:
        """As of now. ``moving``, ``migrations``: of a migrator. ``drained``, ``store``: of a supervisor."""
        told = {"moving": list(moving), "migrations": list(migrations), "drained": list(drained)}
        body = msgspec.structs.replace(self._fixed, at_ns=now_ns, state=state, trouble=trouble, store=store, **told)
        return Publish(subject=self._subject, body=body)

    def beat(self, now_ns: int, fired: TimerFired = FIRST) -> list[Effect]:
        """The presence of now, and the timer ``heartbeat`` for the next one."""
        return [self.presence(now_ns), StartTimer.again(fired, now_ns, HEARTBEAT_NS)]

    def leaving(self, now_ns: int) -> Publish:
        return self.presence(now_ns, PresenceState.LEAVING)
