"""Sends requests at their times over raw sockets, and notes when the first and the last piece came back."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

import msgspec

from bench.live.plan import Planned

_ID = re.compile(rb'"id":"chatcmpl-([^"]+)"')
#: How long the last answers may take after the last request was sent.
DRAIN_S = 120.0


class Played(msgspec.Struct, kw_only=True):
    """Client's view of one request. Times in s; ``late_s``: how much after its time it was sent.

    Attributes:
        request: Ingress's id of it.
        error: Status line of an answer that is no stream, or that it ended early.
    """

    number: int
    request: str = ""
    late_s: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    error: str = ""


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own; the server closes after the answer."""

    def __init__(self, request: bytes, played: Played, done: asyncio.Future[None]) -> None:
        self._request, self._played, self._done = request, played, done
        self._head = b""
        self._tail = b""
        self._began_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._began_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        played = self._played
        if not played.ttft_s:
            self._head += data
            # The first event carries the role alone.
            if self._head.count(b'"content":"') - self._head.count(b'"content":""') > 0 or b'"finish_reason":"' in data:
                played.ttft_s = time.perf_counter() - self._began_s
                known = _ID.search(self._head)
                played.request = known.group(1).decode() if known else ""
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        self._played.e2e_s = time.perf_counter() - self._began_s
        if b"data: [DONE]" not in self._tail:
            self._played.error = self._head[:120].decode(errors="replace") or str(error) or "ended early"
        if not self._done.done():
            self._done.set_result(None)


async def play(requests: Sequence[Planned], *, port: int, model: str) -> list[Played]:
    """Sends each at its time, whatever became of those before; waits for all answers."""
    began_s = time.perf_counter()
    played, pending = [], []
    for number, request in enumerate(requests):
        body = request.body(model)
        late_s = await _until(began_s + request.at_s)
        played.append(Played(number=number, late_s=late_s))
        pending.append(asyncio.ensure_future(_send(port, body, played[-1])))
    await asyncio.wait(pending, timeout=DRAIN_S)
    return played


async def flood(requests: Sequence[Planned], *, port: int, model: str, at_once: int) -> float:
    """Sends as fast as answers come, ``at_once`` under way; returns the requests per second of the middle half."""
    ends: list[float] = []
    waiting = iter(requests)

    async def one_after_the_other() -> None:
        for request in waiting:
            await _send(port, request.body(model), Played(number=0))
            ends.append(time.perf_counter())

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    quarter = len(ends) // 4
    return (len(ends) - 2 * quarter) / (ends[len(ends) - quarter - 1] - ends[quarter])


async def _until(at_s: float) -> float:
    """Sleeps until then; returns how late it became, s."""
    left_s = at_s - time.perf_counter()
    if left_s > 0:
        await asyncio.sleep(left_s)
    return max(0.0, time.perf_counter() - at_s)


async def _send(port: int, body: bytes, played: Played) -> None:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    try:
        await loop.create_connection(lambda: _Exchange(request, played, done), "127.0.0.1", port)
        await done
    except OSError as error:
        played.error = str(error)
