"""Answers to what this runtime asked: one subscription, one table of open questions.

A question is closed exactly once: by its answer, by the server's word that nobody listens, by its timeout, or because
the bus went away. What comes for a closed question is counted and dropped, so a duplicated or late answer never
reaches an actor twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from millrace.actor.headers import read_headers, read_status
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.local import AnsweredTogether, Gathered, Replied, RequestFailed, RequestFailure
from millrace.contracts.message import Body, ErrorReply, Message

Deliver = Callable[[Message], None]


class Question(Protocol):
    """Something that waits in the inbox. Each method returns True once nothing further is awaited."""

    def on_message(self, subject_reply: str, payload: bytes, headers: bytes) -> bool: ...

    def on_answer(self, sender: str, body: Body, traceparent: str) -> bool: ...

    def on_timeout(self) -> None: ...

    def on_disconnect(self) -> bool: ...


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Waits for one answer."""

    correlation: str
    deliver: Deliver

    def on_message(self, subject_reply: str, payload: bytes, headers: bytes) -> bool:
        if read_status(headers) == "503":
            self.fail(RequestFailure.NO_RESPONDERS)
            return True
        try:
            body = decode(payload)
        except MalformedMessage:
            self.fail(RequestFailure.MALFORMED)
            return True
        return self.on_answer(*_answerer(headers, body))

    def on_answer(self, sender: str, body: Body, traceparent: str) -> bool:
        replied = Replied(correlation=self.correlation, body=body)
        self.deliver(Message(replied, sender=sender, traceparent=traceparent))
        return True

    def on_timeout(self) -> None:
        self.fail(RequestFailure.TIMEOUT)

    def on_disconnect(self) -> bool:
        self.fail(RequestFailure.DISCONNECTED)
        return True

    def refuse(self, body: ErrorReply) -> None:
        """Answers in the receiver's place."""
        self.deliver(Message(Replied(correlation=self.correlation, body=body)))

    def fail(self, reason: RequestFailure) -> None:
        self.deliver(Message(RequestFailed(correlation=self.correlation, reason=reason)))


@dataclass(slots=True, eq=False)
class OpenGather:
    """Collects answers until enough are there, or the deadline, or the bus went away."""

    correlation: str
    answers_max: int
    subjects: int  # how many were asked
    deliver: Deliver
    silent: int = 0  # subjects where nobody listens
    answers: list[tuple[str, Any]] = field(default_factory=list)

    def on_message(self, subject_reply: str, payload: bytes, headers: bytes) -> bool:
        if read_status(headers) == "503":
            self.silent += 1
            return self._is_done()
        try:
            body = decode(payload)
        except MalformedMessage:
            return False  # one answer less; the others still count
        return self.on_answer(*_answerer(headers, body))

    def on_answer(self, sender: str, body: Body, traceparent: str) -> bool:
        self.answers += (
            [(sender, each) for each in body.bodies] if isinstance(body, AnsweredTogether) else [(sender, body)]
        )
        return (self.silent > 0 or len(self.answers) >= self.answers_max) and self._is_done()

    def _is_done(self) -> bool:
        if not gathered(len(self.answers), self.answers_max, self.silent, self.subjects):
            return False
        self.on_timeout()
        return True

    def on_timeout(self) -> None:
        self.deliver(Message(Gathered(correlation=self.correlation, answers=self.answers)))

    def on_disconnect(self) -> bool:
        self.on_timeout()
        return True


def _answerer(headers: bytes, body: Body) -> tuple[str, Body, str]:
    sender, traceparent = read_headers(headers)
    return sender, body, traceparent


def gathered(answers: int, answers_max: int, silent: int, subjects: int) -> bool:
    """Whether a gather has all that it will get: ``silent`` of its ``subjects`` have nobody who listens."""
    return silent == subjects or answers + (silent if subjects > 1 else 0) >= answers_max


class Inbox:
    """Open questions by the last token of their reply subject. Lives on one event loop."""

    def __init__(self, prefix: str, count_late: Callable[[], None]) -> None:
        """``prefix`` is the reply subject up to and including its last dot."""
        self.prefix = prefix
        self._count_late = count_late
        self._open: dict[str, tuple[Question, asyncio.TimerHandle | None]] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, question: Question, timeout_s: float | None) -> str:
        """Opens a question; returns its reply subject. None waits until it is closed by hand."""
        self._numbers += 1
        token = str(self._numbers)
        timer = None
        if timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(timeout_s, self._on_timeout, token)
        self._open[token] = (question, timer)
        return self.prefix + token

    def limit(self, reply_subject: str, timeout_s: float) -> None:
        """Bounds a question that is still open."""
        token = reply_subject[len(self.prefix) :]
        entry = self._open.get(token)
        if entry is not None:
            timer = asyncio.get_running_loop().call_later(timeout_s, self._on_timeout, token)
            self._open[token] = (entry[0], timer)

    def close(self, reply_subject: str) -> bool:
        """Forgets a question; it hears nothing more. Returns whether it was open."""
        return self._pop(reply_subject[len(self.prefix) :]) is not None

    def take(self, subject: str, reply: str, payload: bytes, headers: bytes) -> None:
        token = subject[len(self.prefix) :]
        entry = self._open.get(token)
        if entry is None:
            self._count_late()
        elif entry[0].on_message(reply, payload, headers):
            self._pop(token)

    def take_local(self, subject: str, sender: str, body: Body, traceparent: str) -> None:
        """An answer of an actor of this process."""
        token = subject[len(self.prefix) :]
        entry = self._open.get(token)
        if entry is None:
            self._count_late()
        elif entry[0].on_answer(sender, body, traceparent):
            self._pop(token)

    def disconnected(self) -> None:
        """Tells every open question that the bus went away."""
        for token, (question, _timer) in list(self._open.items()):
            if token in self._open and question.on_disconnect():
                self._pop(token)

    def _on_timeout(self, token: str) -> None:
        question = self._pop(token)
        if question is not None:
            question.on_timeout()

    def _pop(self, token: str) -> Question | None:
        question, timer = self._open.pop(token, (None, None))
        if timer is not None:
            timer.cancel()
        return question
