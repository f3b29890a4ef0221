"""The HTTP library by itself: any service can serve a page with it."""

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from millrace.http.certificate import Certificate
from millrace.http.client_connection import ConnectionLimits
from millrace.http.exchange import Exchange, HttpRefusal
from millrace.http.server import HttpServer
from msgspec.structs import replace

from tests.testbed.certificates import make_certificate

LIMITS = ConnectionLimits(body_bytes_max=1000, buffer_bytes_max=1 << 20, slow_reader_s=5, read_s=0.2, idle_s=5)
TAKEN, GONE = asyncio.Event(), asyncio.Event()
PAGE = b"<!doctype html><title>Census</title><p>2 instances</p>"


def _page(exchange: Exchange) -> None:
    if exchange.request.path == "/":
        exchange.respond(200, PAGE, b"text/html; charset=utf-8")
    elif exchange.request.path == "/events":
        exchange.start_stream([(b"x-page", b"census")], b"data: 1\n\n")
        exchange.end(b"data: 2\n\n")
    elif exchange.request.path == "/echo":
        exchange.respond(200, exchange.request.body, b"text/plain")
    elif exchange.request.path == "/slow":
        asyncio.get_running_loop().call_later(0.1, exchange.respond, 200, b"late")
    elif exchange.request.path == "/slow-events":
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, exchange.start_stream, [], b"data: 1\n\n")
        loop.call_later(0.3, exchange.end, b"data: 2\n\n")
    elif exchange.request.path == "/never":
        exchange.on_gone = lambda _: GONE.set()
        TAKEN.set()
    else:
        exchange.respond(404, b"no such page", b"text/plain")


def _refused(exchange: Exchange, refusal: HttpRefusal) -> None:
    exchange.respond(refusal.status, f"{refusal.code}: {refusal.message}".encode(), b"text/plain")


@asynccontextmanager
async def _served(tls: ssl.SSLContext | None = None, limits: ConnectionLimits = LIMITS) -> AsyncIterator[str]:
    server = HttpServer(_page, _refused, limits=limits, connections_max=8, tls=tls)
    port = await server.start("127.0.0.1", 0, reuse_port=False)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
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


async def test_a_gzip_body_is_unpacked_up_to_the_bound_of_bodies():
    async with _served() as url, httpx.AsyncClient(base_url=url) as client:

        async def packed(content: bytes, encoding: str = "gzip") -> httpx.Response:
            return await client.post("/echo", content=content, headers={"content-encoding": encoding})

        whole = b"some words " * 90
        assert (await packed(gzip.compress(whole))).content == whole
        assert (await packed(gzip.compress(b"a") + gzip.compress(b"b"), "x-gzip")).content == b"ab"
        assert (await packed(whole, "identity")).content == whole
        bomb = await packed(gzip.compress(b"x" * 100_000))
        assert len(gzip.compress(b"x" * 100_000)) < LIMITS.body_bytes_max
        assert (bomb.status_code, bomb.text) == (413, "body_too_large: The body is larger than 1000 bytes.")
        for broken in (b"no gzip", gzip.compress(whole)[:-9]):
            answer = await packed(broken)
            assert (answer.status_code, answer.text[:13]) == (400, "invalid_gzip:")
        other = await packed(whole, "br")
        assert (other.status_code, other.text[:21]) == (415, "unsupported_encoding:")


async def test_a_client_that_sends_no_more_gets_its_answer():
    async with _served() as url:
        for path, end in ((b"/slow", b"late"), (b"/slow-events", b"data: 2\n\n\r\n0\r\n\r\n")):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.endswith(end), answer
            assert b"HTTP/1.1 200 OK" in answer
            writer.close()


async def test_half_bodies_that_came_first_give_way_to_others_beyond_the_bound_of_all_together():
    limits = replace(LIMITS, read_s=60, idle_s=60, bodies_bytes_max=2500)
    async with _served(limits=limits) as url, httpx.AsyncClient(base_url=url) as client:

        async def half(before: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(before + b"POST /echo HTTP/1.1\r\nContent-Length: 1000\r\n\r\n" + bytes(900))
            assert (await client.get("/")).content == PAGE  # so that this came before what follows
            return reader, writer

        never = b"POST /never HTTP/1.1\r\nContent-Length: 900\r\n\r\n" + bytes(900)  # handled: no more a body
        behind, first, second = await half(never), await half(), await half()
        assert await behind[0].read() == b"", "no answer into that of an earlier request"
        for _ in range(3):  # those that are whole make room
            assert (await client.post("/echo", content=bytes(600))).content == bytes(600)
        third = await half()
        answer = await first[0].read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\nconnection: close\r\n" in answer
        for reader, writer in (second, third):
            writer.write(bytes(100))
            assert (await reader.readuntil(bytes(1000)))[:12] == b"HTTP/1.1 200"
        for _, writer in (behind, first, second, third):
            writer.close()


def _trusting(certfile: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certfile)


async def test_connections_take_a_certificate_that_changed_and_keep_one_that_does_not_fit(tmp_path: Path):
    certfile, keyfile = make_certificate(tmp_path / "first")
    certificate = Certificate(str(certfile), str(keyfile))
    async with (
        _served(certificate.context) as url,
        httpx.AsyncClient(base_url=url, verify=_trusting(certfile)) as client,
    ):
        assert (await client.get("/events")).text == "data: 1\n\ndata: 2\n\n"
        assert (await client.post("/echo", content=b"x" * 5000)).status_code == 413
        second, second_key = make_certificate(tmp_path / "second")
        second.replace(certfile)
        assert "key values mismatch" in certificate.refresh().lower().replace("_", " ")
        assert (await client.get("/")).status_code == 200
        second_key.replace(keyfile)
        assert certificate.refresh() == ""
        async with httpx.AsyncClient(base_url=url, verify=_trusting(certfile)) as newer:
            assert (await newer.get("/")).content == PAGE
        keyfile.unlink()
        assert "No such file" in certificate.refresh()
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(base_url=url).get("/")
