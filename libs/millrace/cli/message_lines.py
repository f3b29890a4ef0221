"""One bus message as one line for a person, or as a JSON object for a program. Pure.

Known types are read by the codec and shown by what matters in them (message_summaries.py). A type or version that this
code does not know is read by msgpack without types; bytes that are no message are called malformed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgpack
import msgspec

from millrace.cli.field_text import shown_fields
from millrace.cli.message_summaries import summary
from millrace.contracts.catalog import WIRE_TYPES
from millrace.contracts.codec import (
    HEADER_REQUEST,
    HEADER_SENDER,
    HEADER_TRACE,
    HEADER_TYPE,
    PAYLOAD_BYTES_MAX,
    MalformedMessage,
    decode,
)
from millrace.contracts.message import Body

_TAGS = frozenset(kind.type_name() for kind in WIRE_TYPES)

#: Names of fields in JSON that differ.
_KEYS = {"kind": "type"}

_KNOWN, _UNKNOWN, _MALFORMED = "", "unknown", "malformed"


class DecodedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Content of one message, as far as it could be read.

    Attributes:
        at_ns: Unix ns of its arrival here.
        subject: Without the cluster's prefix where it has it.
        trouble: Empty, ``unknown`` (a type or version of no known contract) or ``malformed``.
        detail: What is wrong with it, where something is.
        body: The typed body, else plain types, else None.
    """

    at_ns: int
    subject: str
    sender: str
    kind: str
    request: str
    traceparent: str = ""
    reply_to: str = ""
    trouble: str = ""
    detail: str = ""
    body: Any = None


def read_message(
    *, at_ns: int, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply_to: str, prefix: str
) -> DecodedMessage:
    """Reads a message as far as it goes; never raises."""
    known = headers or {}
    body, trouble, detail = _read_body(payload)
    return DecodedMessage(
        at_ns=at_ns,
        subject=subject.removeprefix(prefix + "."),
        sender=known.get(HEADER_SENDER, ""),
        kind=_kind(body) or known.get(HEADER_TYPE, ""),
        request=_request_of(body, known.get(HEADER_REQUEST, "")),
        traceparent=known.get(HEADER_TRACE, ""),
        reply_to=reply_to,
        trouble=trouble,
        detail=detail,
        body=body,
    )


def message_line(reading: DecodedMessage, *, width: int, headers_only: bool = False, paint: bool = False) -> str:
    """The line, cut at ``width``: time, subject, sender → type (these two where there is room), request, fields."""
    at = datetime.fromtimestamp(reading.at_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]  # noqa: DTZ006  # a person's clock
    kind = reading.kind.removesuffix("/1") or "?"
    parts = [
        (_DIM, at),
        (_CYAN, f"{reading.subject:<18}"),
        (_PLAIN, f"{reading.sender or '?'} → "),
        (_BOLD, kind),
        (_YELLOW, reading.request),
    ]
    if reading.trouble:
        parts.append((_RED, f"{reading.trouble}: {reading.detail}"))
    if not headers_only:
        parts.append((_PLAIN, _fields(reading)))
        if not reading.trouble and sum(len(text) + 1 for _, text in parts) > width:
            parts = [(_DIM, at.partition(".")[0]), (_CYAN, reading.subject), *parts[4:]]
    return _fit([(color, text) for color, text in parts if text], width, paint)


def message_object(reading: DecodedMessage) -> dict[str, Any]:
    """The message as plain types, complete."""
    values = {name: getattr(reading, name) for name in reading.__struct_fields__}
    return {_KEYS.get(key, key): value for key, value in values.items() if value != "" or key == "body"}


def _read_body(payload: bytes) -> tuple[Any, str, str]:
    try:
        return decode(payload), _KNOWN, ""
    except MalformedMessage as error:
        reason = error
    try:
        plain = msgpack.unpackb(payload[:PAYLOAD_BYTES_MAX], strict_map_key=False, raw=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError):  # TypeError: a list as key
        return None, _MALFORMED, f"{reason} ({len(payload)} bytes: {payload[:16].hex(' ')}{'…' * (len(payload) > 16)})"
    if isinstance(plain, dict) and isinstance(plain.get("type"), str) and plain["type"] not in _TAGS:
        return plain, _UNKNOWN, "no such type or version here"
    return plain, _MALFORMED, reason.detail


def _kind(body: Any) -> str:
    if isinstance(body, Body):
        return body.type_name()
    return str(body.get("type", "")) if isinstance(body, dict) else ""


def _request_of(body: Any, header: str) -> str:
    """Return the id of the sequence where the body names one of the header's request, else that of the request."""
    for name in ("sequence", "request"):
        value = body.get(name) if isinstance(body, dict) else getattr(body, name, None)
        if isinstance(value, str) and value.startswith(header):
            return value
    return header


def _fields(reading: DecodedMessage) -> str:
    if isinstance(reading.body, Body):
        return summary(reading.body)
    if isinstance(reading.body, dict):
        return shown_fields(
            {str(key): value for key, value in reading.body.items() if key not in ("type", "request", "sequence")}
        )
    return ""


_PLAIN, _DIM, _BOLD, _CYAN, _YELLOW, _RED = "", "2", "1", "36", "33", "31"


def _fit(parts: list[tuple[str, str]], width: int, paint: bool) -> str:
    """Joins painted parts; cuts at ``width`` visible characters. Control characters never reach the terminal."""
    line, last, room = "", "", width
    for index, (color, text) in enumerate(parts):
        text = "".join(character if character.isprintable() else "·" for character in text)
        text = text if index == 0 or last.endswith(" ") else " " + text
        if len(text) > room:
            text = text[: max(0, room - 1)] + "…" * (room > 0)
        last, room = text, room - len(text)
        line += f"\x1b[{color}m{text}\x1b[0m" if paint and color and text else text
    return line.rstrip()
