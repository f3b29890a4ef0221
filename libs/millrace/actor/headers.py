"""Header bytes of a NATS message, written once per (type, sender) and read without a dictionary.

A general parser costs more than decoding a small body; the runtime needs two values, so it looks for those two.
"""

from __future__ import annotations

import re
from functools import lru_cache

from millrace.contracts.codec import HEADER_REQUEST, HEADER_SENDER, HEADER_TRACE, HEADER_TYPE

_LINE_END = re.compile(r"[\r\n]")
_VERSION = b"NATS/1.0\r\n"
_SENDER = f"\r\n{HEADER_SENDER}:".encode()
_TRACE = f"\r\n{HEADER_TRACE}:".encode()
_STATUS = b"NATS/1.0 "


@lru_cache(maxsize=4096)
def _head(type_name: str, sender: str) -> bytes:
    return _VERSION + f"{HEADER_TYPE}: {type_name}\r\n{HEADER_SENDER}: {_one_line(sender)}\r\n".encode()


def _one_line(value: str) -> str:
    return _LINE_END.sub(" ", value) if "\n" in value or "\r" in value else value


def write_headers(type_name: str, sender: str, request: str, traceparent: str) -> bytes:
    """Header block, final empty line included. Line ends inside values become spaces."""
    block = _head(type_name, sender)
    if request:
        block += f"{HEADER_REQUEST}: {_one_line(request)}\r\n".encode()
    if traceparent:
        block += f"{HEADER_TRACE}: {_one_line(traceparent)}\r\n".encode()
    return block + b"\r\n"


def _value(headers: bytes, name: bytes) -> str:
    start = headers.find(name)
    if start < 0:
        return ""
    start += len(name)
    end = headers.find(b"\r\n", start)
    return headers[start:end].strip().decode("utf-8", "replace")


def read_headers(headers: bytes) -> tuple[str, str]:
    """Sender and traceparent; empty strings where there are none."""
    if not headers:
        return "", ""
    return _value(headers, _SENDER), _value(headers, _TRACE)


def read_header(headers: bytes, name: str) -> str:
    """One value by its exact name; the last of several, which is the server's own; empty where there is none."""
    mark = f"\r\n{name}:".encode()
    return _value(headers[max(0, headers.rfind(mark)) :], mark)


def read_status(headers: bytes) -> str:
    """Inline status of the server, for example ``503`` (no responders); empty for an ordinary message."""
    if headers.startswith(_STATUS):
        return headers[len(_STATUS) : len(_STATUS) + 3].decode("ascii", "replace")
    return ""
