"""Definition of a bus channel: its senders, its receivers and its communication pattern."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from millrace.contracts.message import Body, ErrorReply


class Role(StrEnum):
    """Role of a participant on the bus. Each role has a NATS user with its own permissions."""

    INGRESS = "ingress"
    TAGGER = "tagger"
    PREDICTOR = "predictor"
    COORDINATOR = "coordinator"
    WORKER = "worker"
    MIGRATOR = "migrator"
    BROKER = "broker"
    JUDGE = "judge"
    SUPERVISOR = "supervisor"
    OPERATOR = "operator"  # a person at the command line: reads everything, asks for migrations and drains
    OBSERVER = "observer"  # tap, status, top: reads everything, writes nothing


class Pattern(StrEnum):
    """Communication pattern of a subject."""

    PUBLISH = "publish"
    REQUEST = "request"
    QUEUE_REQUEST = "queue_request"
    GATHER = "gather"


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """One subject with its use.

    Attributes:
        name: Key in the AsyncAPI document.
        subject: After the prefix; ``{parameter}`` stands for one subject token.
        message: Type sent there.
        replies: Types answered, empty for publish.
        queue_group: Of the receivers, of which one takes each message.
        gathers: Whether every receiver answers.
    """

    name: str
    subject: str
    message: type[Body]
    senders: tuple[Role, ...]
    receivers: tuple[Role, ...]
    replies: tuple[type[Body], ...] = ()
    queue_group: str = ""
    gathers: bool = False

    @property
    def pattern(self) -> Pattern:
        if self.gathers:
            return Pattern.GATHER
        if not self.replies:
            return Pattern.PUBLISH
        return Pattern.QUEUE_REQUEST if self.queue_group else Pattern.REQUEST


def channel(subject: str, way: str, message: type[Body], *replies: type[Body]) -> Channel:
    """A row of the catalog. Its name is the subject's fixed tokens; whoever is asked may answer with ErrorReply too.

    Args:
        way: ``senders > receivers``, roles by name; ``> one ROLE`` where one of a queue group takes each message,
            ``> every ROLE`` where all answer that can.
        replies: Types answered; none for a message that is only published.
    """
    before, _, behind = way.partition(" > ")
    gathers, queued = behind.startswith("every "), behind.startswith("one ")
    names = behind.removeprefix("every ").removeprefix("one ")
    return Channel(
        name="_".join(token for token in subject.split(".") if token[0] != "{" and token != "engine"),
        subject=subject,
        message=message,
        senders=_roles(before),
        receivers=_roles(names),
        replies=(*replies, ErrorReply) if replies and not gathers else replies,
        queue_group=names if queued else "",
        gathers=gathers,
    )


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """One JetStream KV bucket.

    Attributes:
        writers: Roles that put and delete keys.
        watchers: Roles that follow it.
        private: Whether it keeps what clients wrote: observers and operators, who may read all others, may not read it.
        ttl_s: Age after which a key is dropped, seconds; 0 for never.
        bytes_max: Size beyond which the oldest keys are dropped; 0 for none.
    """

    name: str
    key: str
    value: type[Body]
    writers: tuple[Role, ...]
    watchers: tuple[Role, ...]
    private: bool = False
    ttl_s: float = 0.0
    bytes_max: int = 0


def bucket(name: str, key: str, way: str, value: type[Body], **bounds: Any) -> Bucket:
    """A row of the catalog.

    Args:
        way: ``writers > watchers``, roles by name.
        bounds: ``private``, ``ttl_s`` and ``bytes_max`` where they are not the defaults.
    """
    writers, watchers = (_roles(names) for names in way.split(" > "))
    return Bucket(name=name, key=key, value=value, writers=writers, watchers=watchers, **bounds)


def _roles(names: str) -> tuple[Role, ...]:
    return tuple(map(Role, names.split(", ")))
