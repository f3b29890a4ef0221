"""Access checks of the simulated server: the permissions that nats-server gives an actor's role."""

from __future__ import annotations

from millrace.contracts.channels import Role
from millrace.contracts.permissions import INBOX, key_subject, permissions, store_permissions
from millrace.contracts.subjects import Subjects
from millrace.sim.failure import SimulationFailed

#: Allowed subjects that are remembered per role; past this many they are looked up anew.
KNOWN_MAX = 100_000


class Access:
    """One role on one cluster. A refusal ends the run: live, the server would drop the message and log it.

    Raises:
        SimulationFailed: from every method, where the server would refuse.
    """

    def __init__(self, role: Role, cluster: str) -> None:
        self.role = role
        self._subjects = Subjects(cluster)
        self._permissions = permissions(role, cluster)
        self._store = store_permissions(role, cluster)
        self._known: set[str] = set()

    def check_publish(self, name: str, subject: str) -> None:
        """A message of the actor ``name``, or an answer to an inbox."""
        if subject in self._known:
            return
        asked = subject.startswith(INBOX)
        known = _inbox_of(subject) if asked else subject
        if known in self._known:
            return
        if not self._permissions.may_publish(subject):
            raise self._refusal(name, "publish to", subject)
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known.add(known)

    def check_subscribe(self, name: str, pattern: str) -> None:
        """A subscription of the actor ``name``."""
        if not self._permissions.may_subscribe(pattern):
            raise self._refusal(name, "subscribe to", pattern)

    def check_write(self, name: str, bucket: str, key: str) -> None:
        """A change of a key in a bucket."""
        subject = f"{key_subject(self._subjects, bucket)}.{key}"
        if not self._store.may_publish(subject):
            raise self._refusal(name, "publish to", subject)

    def _refusal(self, name: str, what: str, subject: str) -> SimulationFailed:
        return SimulationFailed(
            f"{name} may not {what} {subject}: contracts/catalog.py does not let role {self.role} do so"
        )


def _inbox_of(subject: str) -> str:
    """The part of an inbox that names whose it is: ``_INBOX.<role>.``."""
    return subject[: subject.index(".", len(INBOX)) + 1]
