"""Pending replies of a simulated actor: one answer, several, or a write's acknowledgement."""

from __future__ import annotations

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


class WriteResult:
    """In place of a body: the store's answer. A revision of None is a conflict."""

    __slots__ = ("revision",)

    def __init__(self, revision: int | None) -> None:
        self.revision = revision


#: An answer: a body, an unreadable payload, or a word of the server.
Answer = Body | MalformedMessage | NoResponders | WriteResult


class PendingReply(Protocol):
    """Says what to deliver; None where it goes on waiting."""

    def on_answer(self, answer: Answer, sender: str, traceparent: str) -> Message | None: ...

    def on_timeout(self) -> Message: ...

    def on_disconnect(self) -> Message: ...


class SimRequest:
    """One answer, whatever it is."""

    __slots__ = ("correlation",)

    def __init__(self, correlation: str) -> None:
        self.correlation = correlation

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


class SimGather:
    """As many answers as come in time."""

    __slots__ = ("answers", "answers_max", "correlation", "silent", "subjects")

    def __init__(self, correlation: str, answers_max: int, subjects: int) -> None:
        """``subjects``: how many were asked."""
        self.correlation = correlation
        self.answers_max = answers_max
        self.subjects = subjects
        self.silent = 0
        self.answers: list[tuple[str, Any]] = []

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


class SimWrite:
    """The store's acknowledgement."""

    __slots__ = ("correlation",)

    def __init__(self, correlation: str) -> None:
        self.correlation = correlation

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
