"""HTTP/1.1 for httpx's client without TLS, proxies and a pool: events cost a fraction of what they usually do.

Clients of tests run beside the cluster that they load, on the same cores. One connection per request, closed behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

#: Bytes of one read.
READ_BYTES = 65_536


class PlainTransport(httpx.AsyncBaseTransport):
    """Takes ``http`` URLs only; knows the connect and the read time-outs of httpx."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert request.url.scheme == "http", request.url
        limits = request.extensions.get("timeout", {})
        body = await request.aread()
        try:
            async with asyncio.timeout(limits.get("connect")):
                reader, writer = await asyncio.open_connection(request.url.host, request.url.port or 80)
        except TimeoutError as error:
            raise httpx.ConnectTimeout("the connection was not taken in time") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        answer = PlainAnswer(reader, writer, limits.get("read"))
        try:
            lines = [b"%b: %b\r\n" % pair for pair in request.headers.raw]
            writer.write(
                b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode(), request.url.raw_path, b"".join(lines)) + body
            )
            status, headers = await answer.head()
        except BaseException:
            await answer.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=answer, request=request)


class PlainAnswer(httpx.AsyncByteStream):
    """One answer: its head, then its body by iteration."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, read_s: float | None) -> None:
        self._reader = reader
        self._writer = writer
        self._read_s = read_s
        self._rest = b""
        self._chunked = False
        self._left = 0

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Reads up to the body: status and headers."""
        while b"\r\n\r\n" not in self._rest:
            self._rest += await self._read()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        known = dict(headers)
        self._chunked = known.get(b"transfer-encoding") == b"chunked"
        self._left = int(known.get(b"content-length", 0))
        return int(first.split(b" ", 2)[1]), headers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._chunked:
            while not (content := self._chunks())[1]:
                if content[0]:
                    yield content[0]
                self._rest += await self._read()
            yield content[0]
            return
        while self._left > 0:
            piece = self._rest or await self._read()
            self._rest = b""
            self._left -= len(piece)
            yield piece

    async def aclose(self) -> None:
        self._writer.close()

    def _chunks(self) -> tuple[bytes, bool]:
        """Content of all chunks that are whole, and whether the last one was among them."""
        found: list[bytes] = []
        rest, at = self._rest, 0
        while (end := rest.find(b"\r\n", at)) >= 0:
            size = int(rest[at:end].partition(b";")[0], 16)
            if size == 0:
                return b"".join(found), True
            if len(rest) < end + size + 4:
                break
            found.append(rest[end + 2 : end + 2 + size])
            at = end + size + 4
        self._rest = rest[at:]
        return b"".join(found), False

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(self._read_s):
                piece = await self._reader.read(READ_BYTES)
        except TimeoutError as error:
            raise httpx.ReadTimeout("nothing came in time") from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        if not piece:
            raise httpx.RemoteProtocolError("the connection was closed before the end of the answer")
        return piece
