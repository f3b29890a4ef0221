"""The base of every wire message, and the envelope in which one reaches an actor."""

from __future__ import annotations

from typing import Any

import msgspec


class Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base class of message bodies. Subclasses set ``tag="Name/version"``; unknown fields are skipped on decoding."""

    @classmethod
    def type_name(cls) -> str:
        """Tag of this type as it stands in the ``Mr-Type`` header, for example ``SubmitSequence/2``."""
        return str(cls.__struct_config__.tag)


class Message(msgspec.Struct, frozen=True):
    """One delivery: a body with what the bus knew about it. Local messages (timers, engine steps) use the same
    envelope.

    Attributes:
        body: The decoded body, or a local (never on the wire) Struct.
        subject: Subject it came on; empty for local messages.
        sender: Name of the sending actor from ``Mr-Sender``; empty where unknown. Never trusted for permission.
        reply_to: Where a reply is expected; empty where none is.
        traceparent: W3C trace context of the sender's span; empty where there is none.
    """

    body: Any
    subject: str = ""
    sender: str = ""
    reply_to: str = ""
    traceparent: str = ""


class ErrorReply(Body, frozen=True, kw_only=True, tag="ErrorReply/1"):
    """Answers a request that could not be read or is not served here.

    Attributes:
        reason: ``malformed``, ``unexpected`` (a type that this actor does not take), ``overloaded``, or ``forgotten``
            (a sequence of which it holds no tokens).
        detail: One sentence for a person.
    """

    reason: str
    detail: str = ""
