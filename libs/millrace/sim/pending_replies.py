"""Pending replies of a simulated actor: one answer, several, or a write's acknowledgement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from millrace.actor.inbox import gathered
from millrace.contracts.codec import MalformedMessage
from millrace.contracts.local import (
    Gathered,
    KeyFailure,
    KeyNotPut,
    KeyPut,
    Replied,
    RequestFailed,
    RequestFailure,
)
from millrace.contracts.message import Body, Message


class NoResponders:
    """In place of a body: the server's answer that there are no responders."""


@dataclass(slots=True, eq=False)
class WriteResult:
    """In place of a body: the store's answer. A revision of None is a conflict."""

    revision: int | None


#: An answer: a body, an unreadable payload, or a word of the server.
Answer = Body | MalformedMessage | NoResponders | WriteResult


class PendingReply(Protocol):
    """Says what to deliver; None where it goes on waiting."""

    def on_answer(self, answer: Answer, sender: str, traceparent: str) -> Message | None: ...

    def on_timeout(self) -> Message: ...

    def on_disconnect(self) -> Message: ...


@dataclass(slots=True, eq=False)
class SimRequest:
    """One answer, whatever it is."""

    correlation: str

    def on_answer(self, answer: Answer, sender: str, traceparent: str) -> Message | None:
        if isinstance(answer, NoResponders):
            return self._fail(RequestFailure.NO_RESPONDERS)
        if isinstance(answer, MalformedMessage):
            return self._fail(RequestFailure.MALFORMED)
        return Message(Replied(correlation=self.correlation, body=answer), "", sender, "", traceparent)

    def on_timeout(self) -> Message:
        return self._fail(RequestFailure.TIMEOUT)

    def on_disconnect(self) -> Message:
        return self._fail(RequestFailure.DISCONNECTED)

    def _fail(self, reason: RequestFailure) -> Message:
        return Message(RequestFailed(correlation=self.correlation, reason=reason))


@dataclass(slots=True, eq=False)
class SimGather:
    """As many answers as come in time."""

    correlation: str
    answers_max: int
    subjects: int  # how many were asked
    silent: int = 0
    answers: list[tuple[str, Any]] = field(default_factory=list)

    def on_answer(self, answer: Answer, sender: str, traceparent: str) -> Message | None:
        if isinstance(answer, NoResponders):
            self.silent += 1
        elif isinstance(answer, Body):
            self.answers.append((sender, answer))
        done = gathered(len(self.answers), self.answers_max, self.silent, self.subjects)
        return self.on_timeout() if done else None

    def on_timeout(self) -> Message:
        return Message(Gathered(correlation=self.correlation, answers=self.answers))

    def on_disconnect(self) -> Message:
        return self.on_timeout()


@dataclass(slots=True, eq=False)
class SimWrite:
    """The store's acknowledgement."""

    correlation: str

    def on_answer(self, answer: Answer, sender: str, traceparent: str) -> Message | None:
        if not isinstance(answer, WriteResult):
            return self.on_timeout()
        if answer.revision is None:
            return Message(KeyNotPut(correlation=self.correlation, reason=KeyFailure.CONFLICT))
        return Message(KeyPut(correlation=self.correlation, revision=answer.revision))

    def on_timeout(self) -> Message:
        return Message(KeyNotPut(correlation=self.correlation, reason=KeyFailure.UNAVAILABLE))

    def on_disconnect(self) -> Message:
        return self.on_timeout()
