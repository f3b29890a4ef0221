"""Definition of a bus channel: its senders, its receivers and its communication pattern."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from millrace.contracts.message import Body


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
        messages: Types sent there.
        replies: Types answered, empty for publish.
        queue_group: Of the receivers, of which one takes each message.
        gathers: Whether every receiver answers.
    """

    name: str
    subject: str
    messages: tuple[type[Body], ...]
    senders: tuple[Role, ...]
    receivers: tuple[Role, ...]
    replies: tuple[type[Body], ...] = ()
    queue_group: str = ""
    gathers: bool = False
    summary: str = ""

    @property
    def pattern(self) -> Pattern:
        if self.gathers:
            return Pattern.GATHER
        if not self.replies:
            return Pattern.PUBLISH
        return Pattern.QUEUE_REQUEST if self.queue_group else Pattern.REQUEST


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
    summary: str = ""
