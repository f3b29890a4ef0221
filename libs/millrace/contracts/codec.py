"""Bytes to bodies and back. The tag inside the body decides its type; headers are for people and routing."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, cast

import msgspec

from millrace.contracts.catalog import WIRE_TYPES
from millrace.contracts.message import Body

HEADER_TYPE = "Mr-Type"
HEADER_REQUEST = "Mr-Request"
HEADER_SENDER = "Mr-Sender"
HEADER_TRACE = "traceparent"

#: Largest payload that is read, bytes. A 128 Ki-token prompt in MessagePack is at most 640 KiB; nats-server's own
#: default is 1 MiB.
PAYLOAD_BYTES_MAX = 1_000_000


class MalformedMessage(Exception):
    """Bytes that are no known message. ``kind`` is ``too_large``, ``undecodable`` or ``invalid`` (unknown tag or
    version, wrong field types).
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reduce(or_, cast("tuple[Any, ...]", WIRE_TYPES)))


def encode(body: Body) -> bytes:
    """MessagePack of a body, tag included."""
    return _encoder.encode(body)


def decode(payload: bytes) -> Body:
    """Reads any wire body.

    Raises:
        MalformedMessage: with the kind and what was wrong.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise MalformedMessage("too_large", f"{len(payload)} bytes, at most {PAYLOAD_BYTES_MAX}")
    try:
        return cast("Body", _decoder.decode(payload))
    except msgspec.ValidationError as error:
        raise MalformedMessage("invalid", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage("undecodable", str(error)) from None
