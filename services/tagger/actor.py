"""The tagger: says how long an answer is expected to be.

Owns: nothing yet but its own heartbeat. It has no length model: it answers "unknown" to everything, which every asker
must be able to live
with anyway (a tagger that is down or late means the same).

| message in | change | messages out |
|---|---|---|
| TagRequest | counts it | LengthTag with source ``unknown`` |
| TimerFired(heartbeat) | | ServicePresence, next timer |
| StopRequested | | ServicePresence(LEAVING), Stop |

Overload: each request is answered in constant time; askers carry a deadline and go on without a tag.
"""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect, Publish, Reply, StartTimer, Stop, Subscribe
from millrace.contracts.catalog import Role
from millrace.contracts.local import BusDisconnected, BusReconnected, StopRequested, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.status import PresenceState, ServicePresence
from millrace.contracts.subjects import Subjects
from millrace.contracts.tagger import LengthTag, TagRequest

#: How often the tagger says that it is there. Receivers call a service silent after several of these.
HEARTBEAT_NS = 1_000_000_000

#: Taggers share the work; the name is fixed so that replicas need no configuration.
QUEUE_GROUP = "tagger"

ACCEPTS = (TagRequest,)


class TaggerActor:
    """Answers TagRequest; any number of them may run."""

    def __init__(self, *, name: str, cluster: str, incarnation: int) -> None:
        self.name = name
        self._subjects = Subjects(cluster)
        self._incarnation = incarnation
        self._answered = 0

    def start(self, now_ns: int) -> list[Effect]:
        """Subscribes in the queue group and begins the heartbeat."""
        subject = f"{self._subjects.prefix}.tag.*"
        return [Subscribe(subject=subject, queue_group=QUEUE_GROUP), *self._heartbeat(now_ns)]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """See the table above."""
        match message.body:
            case TagRequest() as body:
                return self._on_tag_request(message, body)
            case TimerFired():
                return self._heartbeat(now_ns)
            case StopRequested():
                return [self._presence(now_ns, PresenceState.LEAVING), Stop(reason="asked to stop")]
            case BusDisconnected() | BusReconnected():
                return []
            case _:
                return []

    def _on_tag_request(self, message: Message, body: TagRequest) -> list[Effect]:
        self._answered += 1
        tag = LengthTag(request=body.request)
        return [Reply(to=message.reply_to, body=tag, request=body.request)] if message.reply_to else []

    def _heartbeat(self, now_ns: int) -> list[Effect]:
        timer = StartTimer(name="heartbeat", at_ns=now_ns + HEARTBEAT_NS)
        return [self._presence(now_ns, PresenceState.ALIVE), timer]

    def _presence(self, now_ns: int, state: PresenceState) -> Publish:
        body = ServicePresence(
            role=Role.TAGGER, name=self.name, incarnation=self._incarnation, at_ns=now_ns, state=state
        )
        return Publish(subject=self._subjects.presence(Role.TAGGER, self.name), body=body)

    def snapshot(self) -> dict[str, Any]:
        """How many requests were answered."""
        return {"name": self.name, "answered": self._answered}

    def check_invariants(self) -> None:
        """Counts never fall below zero."""
        assert self._answered >= 0
