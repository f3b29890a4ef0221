"""HTTP/1.1 for httpx's client without TLS, proxies and a pool: events cost a fraction of what they usually do.

Clients of tests run beside the cluster that they load, on the same cores. One connection per request, closed behind it.
httptools parses the answers.
"""

import asyncio
from collections.abc import AsyncIterator

import httpx
from httptools import HttpParserError, HttpResponseParser

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
            status = await answer.head()
        except BaseException:
            await answer.aclose()
            raise
        return httpx.Response(status, headers=answer.headers, stream=answer, request=request)


class PlainAnswer(httpx.AsyncByteStream):
    """One answer: its head, then its body by iteration. Its ``on_...`` methods are called by the parser."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, read_s: float | None) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self._reader = reader
        self._writer = writer
        self._read_s = read_s
        self._parser = HttpResponseParser(self)
        self._body: list[bytes] = []
        self._begun = self._whole = False

    async def head(self) -> int:
        """Reads up to the body; returns the status."""
        while not self._begun:
            await self._read()
        return self._parser.get_status_code()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._body:
                content, self._body = b"".join(self._body), []
                yield content
            if self._whole:
                return
            await self._read()

    async def aclose(self) -> None:
        self._writer.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._whole = True

    async def _read(self) -> None:
        """Parses what comes next."""
        try:
            async with asyncio.timeout(self._read_s):
                piece = await self._reader.read(READ_BYTES)
        except TimeoutError as error:
            raise httpx.ReadTimeout("nothing came in time") from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        if not piece:
            raise httpx.RemoteProtocolError("the connection was closed before the end of the answer")
        try:
            self._parser.feed_data(piece)
        except HttpParserError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
