"""The HTTP library by itself: any service can serve a page with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from millrace.http.connection import ConnectionLimits
from millrace.http.exchange import Exchange, HttpRefusal
from millrace.http.server import HttpServer

LIMITS = ConnectionLimits(body_bytes_max=1000, buffer_bytes_max=1 << 20, slow_reader_s=5, read_s=0.2, idle_s=5)
PAGE = b"<!doctype html><title>Census</title><p>2 instances</p>"


def _page(exchange: Exchange) -> None:
    if exchange.request.path == "/":
        exchange.respond(200, PAGE, b"text/html; charset=utf-8")
    elif exchange.request.path == "/events":
        exchange.start_stream([(b"x-page", b"census")], b"data: 1\n\n")
        exchange.end(b"data: 2\n\n")
    else:
        exchange.respond(404, b"no such page", b"text/plain")


def _refused(exchange: Exchange, refusal: HttpRefusal) -> None:
    exchange.respond(refusal.status, f"{refusal.code}: {refusal.message}".encode(), b"text/plain")


@asynccontextmanager
async def _served() -> AsyncIterator[str]:
    server = HttpServer(_page, _refused, limits=LIMITS, connections_max=2)
    port = await server.start("127.0.0.1", 0, reuse_port=False)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(1.0)


async def test_a_page_and_a_stream_are_served():
    async with _served() as url, httpx.AsyncClient(base_url=url) as client:
        page = await client.get("/")
        assert (page.status_code, page.content) == (200, PAGE)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        head = await client.head("/")
        assert (head.content, head.headers["content-length"]) == (b"", str(len(PAGE)))
        stream = await client.get("/events")
        assert stream.text == "data: 1\n\ndata: 2\n\n"
        assert stream.headers["x-page"] == "census"
        assert (await client.get("/other")).status_code == 404


async def test_what_is_no_request_is_answered_in_the_services_words():
    async with _served() as url, httpx.AsyncClient(base_url=url) as client:
        large = await client.post("/", content=b"x" * 1001)
        assert (large.status_code, large.text) == (413, "body_too_large: The body is larger than 1000 bytes.")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nHost: ")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert answer.endswith(b"request_timeout: The request did not come whole in time.")
        writer.close()
