"""Effects that an actor may ask of its runtime. The set is closed; services add effects of their own, which handlers
of their shell carry out.

An actor returns effects; the runtime carries them out in order and delivers results as later messages
(contracts/local.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.contracts.local import TimerFired
from millrace.contracts.message import Body, ErrorReply, Message


class Effect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all effects."""


class Publish(Effect, frozen=True, kw_only=True):
    """Sends a body to a subject, at most once.

    Attributes:
        request: Value of the ``Mr-Request`` header; empty for none.
        traceparent: Trace context header; empty for none.
    """

    subject: str
    body: Body
    request: str = ""
    traceparent: str = ""


class Request(Effect, frozen=True, kw_only=True):
    """Sends a body and wants one answer: Replied or RequestFailed with the same correlation, exactly one of them.

    Attributes:
        correlation: Chosen by the actor, unique among its open requests.
        timeout_ns: Time until RequestFailed.
    """

    subject: str
    body: Body
    correlation: str
    timeout_ns: int
    request: str = ""
    traceparent: str = ""


class Gather(Effect, frozen=True, kw_only=True):
    """Sends a body and collects answers: exactly one Gathered, at the deadline at the latest.

    Attributes:
        subjects: Where to ask. One that many answer (a broadcast), or several that one each answers (queue groups).
        answers_max: So many answers are enough. Of several subjects, one where nobody listens counts as answered.
    """

    subjects: tuple[str, ...]
    body: Body
    correlation: str
    timeout_ns: int
    answers_max: int
    request: str = ""
    traceparent: str = ""


class Reply(Effect, frozen=True, kw_only=True):
    """Answers a message: ``to`` is its ``reply_to``."""

    to: str
    body: Body
    request: str = ""
    traceparent: str = ""


class Subscribe(Effect, frozen=True, kw_only=True):
    """Wants messages of a subject (NATS wildcards allowed), shared within the queue group where one is named."""

    subject: str
    queue_group: str = ""


class Unsubscribe(Effect, frozen=True, kw_only=True):
    """Ends a subscription; messages under way may still come."""

    subject: str


class WatchKeys(Effect, frozen=True, kw_only=True):
    """Wants KeyChanged for each key of a bucket, existing ones first, then BucketReady."""

    bucket: str


class PutKey(Effect, frozen=True, kw_only=True):
    """Writes a key: KeyPut or KeyNotPut follows.

    Attributes:
        expected_revision: Write only if the key stands at this revision (0: only if it does not exist); None for
            unconditionally.
    """

    bucket: str
    key: str
    value: Body
    correlation: str
    expected_revision: int | None = None


class DeleteKey(Effect, frozen=True, kw_only=True):
    """Deletes a key: KeyPut or KeyNotPut follows."""

    bucket: str
    key: str
    correlation: str
    expected_revision: int | None = None


class StartTimer(Effect, frozen=True, kw_only=True):
    """TimerFired(name) at ``at_ns`` or soon after. Starting a name again moves it."""

    name: str
    at_ns: int

    @classmethod
    def again(cls, fired: TimerFired, now_ns: int, period_ns: int) -> StartTimer:
        """The next turn of a periodic one, in step with this turn: those that began together in a process go on to wake
        it together.
        """
        at_ns = (fired.at_ns or now_ns) + period_ns
        return cls(name=fired.name, at_ns=at_ns if at_ns > now_ns else now_ns + period_ns)


class CancelTimer(Effect, frozen=True, kw_only=True):
    """Forgets a timer; unknown names are no error."""

    name: str


class Log(Effect, frozen=True, kw_only=True):
    """Writes a structured log line.

    Attributes:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        event: Short snake_case name of what happened.
    """

    level: str
    event: str
    fields: dict[str, Any] = {}
    request: str = ""
    traceparent: str = ""


class RecordSpan(Effect, frozen=True, kw_only=True):
    """Records a finished span. Emitted only for sampled traces (flag 01 of ``traceparent``); never one per token.

    Attributes:
        name: ``ingress``, ``tag``, ``dispatch``, ``queue``, ``prefill``, ``decode``, ...
        traceparent: ``00-<trace id>-<this span's id>-<flags>``: the span's own context.
        parent_span_id: 16 hex digits; empty for a root.
        start_ns: Unix ns.
        end_ns: Unix ns.
        links: traceparents of linked spans (the earlier epoch's decode span in a continuation).
        events: Triples of (name, at_ns, attributes).
        error: Set where the span failed.
    """

    name: str
    traceparent: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = {}
    links: list[str] = []
    events: list[tuple[str, int, dict[str, Any]]] = []
    error: str = ""


class Stop(Effect, frozen=True, kw_only=True):
    """Ends this actor's process after all earlier effects; the runtime closes the bus in order."""

    reason: str = ""


def reply(reply_to: str, body: Body, *, request: str = "", traceparent: str = "") -> list[Effect]:
    """The reply, where one is expected."""
    return [Reply(to=reply_to, body=body, request=request, traceparent=traceparent)] if reply_to else []


def unexpected(message: Message, detail: str) -> list[Effect]:
    """The reply to a message that an actor does not take, where one is expected."""
    return reply(message.reply_to, ErrorReply(reason="unexpected", detail=detail))
