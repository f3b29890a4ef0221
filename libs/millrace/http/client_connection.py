"""One HTTP/1.1 connection: bytes to requests, in order, with every bound that a client could overstep.

Why not ASGI: deltas come as effects in the middle of the bus's callback, and a write straight to the transport costs
no task switch; a lost connection is known in the same loop turn; and the transport's buffer can be measured.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import unquote

import httptools
import msgspec

from millrace.http.exchange import DisconnectReason, Exchange, HttpRefusal, HttpRequest
from millrace.http.unpacking import TooLargeError, UnpackingError, gunzip

if TYPE_CHECKING:
    from millrace.http.server import HttpServer

#: Request line and headers together, bytes. Browsers and proxies send under 16 KiB.
HEAD_BYTES_MAX = 65_536
#: Requests that may wait behind the one being answered on a pipelined connection; then reading stops.
PIPELINED_MAX = 16
#: After refusing a body, how long and how much of it is still read and thrown away, so that the client reads the
#: answer instead of a reset.
LINGER_S = 2.0
LINGER_BYTES_MAX = 64_000_000

#: A client that sends no more may have left, or may wait for its answer. It gets this, which a waiting one skips: where
#: the peer is gone, a further write fails. Written at once, after PROBE_S, and with each sweep until the answer begins.
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_S = 0.1
_PLAIN = (b"", b"identity")
_GZIP = (b"gzip", b"x-gzip")


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one connection.

    Attributes:
        body_bytes_max: Largest request body, also when it is unpacked.
        buffer_bytes_max: Bytes that may wait for a slow reader.
        slow_reader_s: How long more than a quarter of that may wait.
        read_s: Time to send a whole request.
        idle_s: Time between requests.
        bodies_bytes_max: Bytes of bodies of all connections together that nobody has begun to handle.
    """

    body_bytes_max: int
    buffer_bytes_max: int
    slow_reader_s: float
    read_s: float
    idle_s: float
    bodies_bytes_max: int = 1 << 30


class HttpConnection(asyncio.Protocol):
    """The protocol of one connection; see the module."""

    transport: asyncio.Transport

    def __init__(self, host: HttpServer) -> None:
        self._host = host
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._last_activity_s = host.now_s()
        self._behind_since_s = 0.0
        self._half_closed = False  # the client sends no more
        self._linger_bytes = -1  # what may still be thrown away; -1 while the connection is in use
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._in_request = False
        self._keep_alive = False
        self._chunked = True

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a server's are always both ways
        self.transport.set_write_buffer_limits(high=self._host.limits.buffer_bytes_max // 4)
        if not self._host.opened(self):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.lost(self)
        self._leave(DisconnectReason.CLIENT_GONE)

    def data_received(self, data: bytes) -> None:
        if self._linger_bytes >= 0:
            self._discard(len(data))
            return
        if not self._in_request:
            self._last_activity_s = self._host.now_s()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Not taken up; the request itself has been read whole. What follows is a new message.
            self._parser = httptools.HttpRequestParser(self)
            rest = data[upgrade.args[0] if upgrade.args else len(data) :]
            if rest and self._linger_bytes < 0:
                self.data_received(rest)
        except httptools.HttpParserError as error:
            self._refuse(400, f"This is no valid HTTP request: {error}.", code="invalid_http")

    def eof_received(self) -> bool:
        """The client sends no more: it gets its answer if that has not begun. One that leaves a stream has left."""
        last = self._waiting[-1] if self._waiting else self._current
        if self._linger_bytes >= 0 or self._in_request or self._current is None or last is None:
            return False
        if self._current.streaming or not self._current.request.chunked:  # HTTP/1.0 cannot be probed
            return False
        last.request.keep_alive = False
        self._half_closed = True
        self._probe()
        asyncio.get_running_loop().call_later(PROBE_S, self._probe)
        return True

    def _probe(self) -> None:
        if self._current is not None and not self._current.streaming and not self.transport.is_closing():
            self.transport.write(_PROBE)

    def pause_writing(self) -> None:
        self._behind_since_s = self._host.now_s()

    def resume_writing(self) -> None:
        self._behind_since_s = 0.0

    # httptools

    def on_message_begin(self) -> None:
        self._reset()
        self._in_request = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._chunked = self._parser.get_http_version() == "1.1"
        # To be asked here: the parser forgets with the message's last byte.
        self._keep_alive = self._chunked and self._parser.should_keep_alive() and not self._host.closing
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._host.limits.body_bytes_max:
            self._refuse_body()
        elif self._headers.get(b"expect", b"").lower() == b"100-continue" and self._linger_bytes < 0:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._linger_bytes >= 0:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._host.limits.body_bytes_max:
            self._refuse_body()
        else:
            self._body.append(body)
            self._hold()

    def on_message_complete(self) -> None:
        if self._linger_bytes >= 0:
            return
        self._in_request = False
        body = self._whole_body()
        self._body, self._body_bytes = [], 0
        if body is None:
            return
        exchange = Exchange(self._request(body), self)
        if self._current is not None:
            self._waiting.append(exchange)
            if len(self._waiting) >= PIPELINED_MAX:
                self.transport.pause_reading()
            self._hold()
            return
        self._current = exchange
        self._handle(exchange)

    # Channel

    def date_header(self) -> bytes:
        """``date: ...`` with its line end."""
        return self._host.date_header

    def finished(self, exchange: Exchange) -> None:
        if self._linger_bytes >= 0:
            if not self.transport.is_closing() and self.transport.can_write_eof():  # TLS cannot: it ends in LINGER_S
                self.transport.write_eof()  # the client sees the end at once, and may go on sending for a while
            return
        self._current = None
        self._last_activity_s = self._host.now_s()
        if not exchange.request.keep_alive:
            self.transport.close()
        elif self._waiting:
            # Not from here: a client could nest as many calls as it pipelines requests.
            self._current = self._waiting.popleft()
            asyncio.get_running_loop().call_soon(self._next, self._current)

    def _next(self, exchange: Exchange) -> None:
        if exchange.closed or self.transport.is_closing():
            return
        self.transport.resume_reading()
        self._handle(exchange)

    def _handle(self, exchange: Exchange) -> None:
        self._hold()
        self._host.handle(exchange)
        exchange.request.body = b""  # it has been read, and the answer may take minutes

    def _hold(self) -> None:
        self._host.hold(self, self._body_bytes + sum(len(each.request.body) for each in self._waiting))

    # Bounds

    def sweep(self, now_s: float) -> None:
        """End the connection where it oversteps a time; called about once a second."""
        limits = self._host.limits
        if self._half_closed:
            self._probe()
        if self._linger_bytes >= 0:
            if now_s - self._last_activity_s > LINGER_S:
                self.transport.close()
        elif self._behind_since_s and now_s - self._behind_since_s > limits.slow_reader_s:
            self.cut(DisconnectReason.SLOW_READER)
        elif self._in_request:
            if now_s - self._last_activity_s > limits.read_s:
                self._refuse(408, "The request did not come whole in time.", code="request_timeout")
        elif self._current is None and now_s - self._last_activity_s > limits.idle_s:
            self.transport.close()

    def check_buffer(self) -> None:
        """Cut a reader that lets more than the bound wait; called after writes to a stream."""
        if self._behind_since_s and self.transport.get_write_buffer_size() > self._host.limits.buffer_bytes_max:
            self.cut(DisconnectReason.SLOW_READER)

    def cut(self, reason: DisconnectReason) -> None:
        self._leave(reason)
        self.transport.abort()

    def give_way(self) -> None:
        """Refuse what was received of requests, so that there is room for those of others."""
        self._refuse(503, "Too many bytes of other bodies came before this one was whole.", code="overloaded")

    def close_when_idle(self) -> None:
        """End the connection after what is being answered; at once where nothing is."""
        self._keep_alive = False  # of a request that is being read
        if self._current is not None:
            self._current.request.keep_alive = False
        elif not self._waiting and not self._in_request:
            self.transport.close()

    @property
    def busy(self) -> bool:
        return self._current is not None

    def _whole_body(self) -> bytes | None:
        """The request's body, unpacked; None where it was refused."""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        encoding = self._headers.get(b"content-encoding", b"").lower()
        if encoding in _PLAIN:
            return body
        if encoding not in _GZIP:
            shown = encoding.decode("latin-1")[:40]
            self._refuse(415, f"Content-Encoding `{shown}` is not supported: use gzip.", code="unsupported_encoding")
            return None
        try:
            return gunzip(body, self._host.limits.body_bytes_max)
        except TooLargeError:
            self._refuse_body()
        except UnpackingError as error:
            self._refuse(400, f"The body is not valid gzip: {error}.", code="invalid_gzip")
        return None

    def _request(self, body: bytes) -> HttpRequest:
        url = self._url
        if not url.startswith(b"/") and url.lower().startswith(b"http"):  # as a proxy writes it
            parts = httptools.parse_url(url)
            url = (parts.path or b"/") + b"?" + (parts.query or b"")
        before, _, query = url.partition(b"#")[0].partition(b"?")
        path = before.decode("latin-1")
        return HttpRequest(
            method=self._parser.get_method().decode("ascii"),
            path=unquote(path) if "%" in path else path,
            headers=self._headers,
            body=body,
            keep_alive=self._keep_alive,
            chunked=self._chunked,
            query=query,
        )

    def _leave(self, reason: DisconnectReason) -> None:
        current, self._current = self._current, None
        self._waiting.clear()
        if current is not None:
            current.gone(reason)

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(431, f"The headers are longer than {HEAD_BYTES_MAX} bytes.", code="headers_too_long")

    def _refuse_body(self) -> None:
        limit = self._host.limits.body_bytes_max
        self._refuse(413, f"The body is larger than {limit} bytes.", code="body_too_large")

    def _refuse(self, status: int, message: str, *, code: str) -> None:
        """Answers what never became a request, and reads on only to throw away."""
        if self._linger_bytes >= 0:
            return
        self._linger_bytes = LINGER_BYTES_MAX
        self._last_activity_s = self._host.now_s()
        self._in_request = False
        if self._current is not None:  # an earlier response is under way: its bytes must not be mixed with these
            self.cut(DisconnectReason.CLIENT_GONE)
            return
        self._body, self._body_bytes = [], 0
        self._hold()
        # A parser that has failed does not know its method either; it matters for HEAD only.
        request = HttpRequest(method="POST", path="", headers=self._headers, body=b"", keep_alive=False, chunked=True)
        exchange = Exchange(request, self)
        if status == 503:
            exchange.headers = ((b"retry-after", b"1"),)
        self._host.refused(exchange, HttpRefusal(status=status, message=message, code=code))

    def _discard(self, count: int) -> None:
        self._linger_bytes -= count
        if self._linger_bytes < 0:
            self._linger_bytes = 0
            self.transport.abort()
