"""One request with its response: what a handler gets. Writing never waits; the transport holds what is not yet sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from millrace.http.client_connection import HttpConnection

HeaderPairs = Sequence[tuple[bytes, bytes]]

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_STREAM_HEAD = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_BEARER = re.compile(rb"(?i:bearer) +(\S+)")


class DisconnectReason(StrEnum):
    """Reason why the response is not read any more."""

    CLIENT_GONE = "client_gone"
    SLOW_READER = "slow_reader"
    STOPPING = "stopping"


class HttpRequest(msgspec.Struct, gc=False):
    """A whole request.

    Attributes:
        path: Decoded path without the query.
        headers: By lower-case name; of repeated ones the last.
        keep_alive: Whether the connection outlives the response.
        chunked: Whether the response may use chunked coding (HTTP/1.1).
        query: As it was sent, without the question mark.
    """

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    chunked: bool
    query: bytes = b""


class HttpRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to bytes that never became a request: bad HTTP, too large, too slow."""

    status: int
    message: str
    code: str


class Exchange:
    """One request and its response. Owned by its handler until ``respond``, ``end`` or ``gone``; what is written
    after that is dropped.

    Attributes:
        on_gone: Called once, with the reason, if the connection ends before the response is complete.
        headers: Further headers of its response, whatever it is.
        streaming: Whether the response is an event stream that has begun.
    """

    __slots__ = ("_channel", "closed", "headers", "on_gone", "request", "streaming")

    def __init__(self, request: HttpRequest, channel: HttpConnection) -> None:
        self.request = request
        self._channel = channel
        self.streaming = False
        self.closed = False
        self.headers: HeaderPairs = ()
        self.on_gone: Callable[[DisconnectReason], None] | None = None

    @property
    def waiting_bytes(self) -> int:
        return self._channel.transport.get_write_buffer_size()

    @property
    def bearer(self) -> bytes:
        """The bearer token of its request; empty for none."""
        match = _BEARER.fullmatch(self.request.headers.get(b"authorization", b"").strip())
        return match.group(1) if match else b""

    def respond(
        self, status: int, body: bytes, content_type: bytes = b"application/json", headers: HeaderPairs = ()
    ) -> None:
        if self.closed:
            return
        request = self.request
        head = [_STATUS_LINES[status], self._channel.date_header(), b"content-type: ", content_type]
        head.append(b"\r\ncontent-length: %d\r\n" % len(body))
        self._add_headers(head, headers)
        if request.method != "HEAD":
            head.append(body)
        self._close()
        self._channel.transport.write(b"".join(head))
        self._channel.finished(self)

    def start_stream(self, headers: HeaderPairs, first: bytes) -> None:
        """Send the head of an event stream with its first events (may be none)."""
        if self.closed:
            return
        self.streaming = True
        head = [_STATUS_LINES[200], self._channel.date_header(), _STREAM_HEAD]
        if self.request.chunked:
            head.append(b"transfer-encoding: chunked\r\n")
        else:
            self.request.keep_alive = False  # its end is the connection's end
        self._add_headers(head, headers)
        if first:
            head.append(self._framed(first))
        self._channel.transport.write(b"".join(head))

    def write(self, events: bytes) -> None:
        if not self.closed and events:
            self._channel.transport.write(self._framed(events))
            self._channel.check_buffer()

    def end(self, events: bytes = b"") -> None:
        """Send the last events and complete the stream."""
        if self.closed:
            return
        out = self._framed(events) if events else b""
        if self.request.chunked:
            out += _LAST_CHUNK
        self._close()
        if out:
            self._channel.transport.write(out)
        self._channel.finished(self)

    def gone(self, reason: DisconnectReason) -> None:
        """Called by the connection when its client is gone."""
        if self.closed:
            return
        on_gone, self.on_gone = self.on_gone, None
        self._close()
        if on_gone is not None:
            on_gone(reason)

    def _close(self) -> None:
        self.closed = True
        self.on_gone = None  # breaks the reference cycle with the handler's state

    def _framed(self, events: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(events), events) if self.request.chunked else events

    def _add_headers(self, head: list[bytes], headers: HeaderPairs) -> None:
        for name, value in (*headers, *self.headers):
            head += (name, b": ", value, b"\r\n")
        if not self.request.keep_alive:
            head.append(b"connection: close\r\n")
        head.append(b"\r\n")
