"""Streams whose every event has its time: what a client sees while its request moves."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, Protocol

import httpx
import msgspec

from tests.testbed.plain_http import PlainTransport
from tests.testbed.waiting import until


class Api(Protocol):
    """API that streams are sent to."""

    url: str
    model: str


#: Printable single-byte tokens: prompts of exact length that no other prompt shares a prefix with.
LETTERS = range(40, 120)


@dataclass(slots=True)
class TimedStream:
    """One streamed completion.

    Attributes:
        sequence: Its id on the bus; empty before the first event.
        times: Monotonic seconds of each event with text.
        token_ids: Its tokens, where it asks for them.
        began: When it was sent.
        settle: After so many events, or tokens, ``settled`` is set; also at its end, however it ends.
    """

    began: float = 0.0
    sequence: str = ""
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    error: str = ""
    tokens: int = 0
    settle: int = 24
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def outcome(self) -> tuple[str, str, int]:
        """Part of the result that must not depend on faults."""
        return self.text, self.finish, self.tokens

    @property
    def pause_s(self) -> float:
        """Longest time without an event, from when it was sent to the last one."""
        return max((later - earlier for earlier, later in pairwise([self.began, *self.times])), default=0.0)

    @property
    def took_s(self) -> float:
        """Time from when it was sent to its last text."""
        return self.times[-1] - self.began if self.times else 0.0

    def intervals(self, since: float, until: float) -> list[float]:
        """Seconds between neighbouring events, where any part of that time lies in the window."""
        pairs = pairwise(self.times)
        return [later - earlier for earlier, later in pairs if since <= later and earlier <= until]


async def play(client: httpx.AsyncClient, rig: Api, stream: TimedStream, **fields: Any) -> TimedStream:
    """Runs a stream to its end."""
    body = {"model": rig.model, "stream": True, "temperature": 0, "stream_options": {"include_usage": True}, **fields}
    stream.began = time.monotonic()
    try:
        async with client.stream("POST", f"{rig.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                stream.error = f"{answer.status_code} {(await answer.aread()).decode()[:300]}"
                return stream
            async for event in events(answer):
                _take(stream, event, time.monotonic())
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"
    finally:
        stream.settled.set()
    return stream


def _take(stream: TimedStream, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        stream.error = str(event["error"])
        return
    if not stream.sequence:
        stream.sequence = event["id"].partition("-")[2] + ".0"
    for choice in event["choices"]:
        stream.text += choice["text"]
        stream.token_ids += choice.get("token_ids") or []
        stream.finish = choice["finish_reason"] or stream.finish
        stream.times.append(now)
    if max(len(stream.times), len(stream.token_ids)) >= stream.settle:
        stream.settled.set()
    if event.get("usage"):
        stream.tokens = event["usage"]["completion_tokens"]


def prompt_ids(rng: Random, tokens: int) -> list[int]:
    """A prompt of exactly so many tokens."""
    return [rng.choice(LETTERS) for _ in range(tokens)]


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Every event of a streamed answer but ``[DONE]``."""
    rest = b""
    async for piece in answer.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield msgspec.json.decode(line[6:])


def client(timeout_s: float = 600, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """A client for many streams at once, over plain HTTP."""
    return httpx.AsyncClient(timeout=timeout_s, headers=headers, transport=PlainTransport())


async def until_answered(url: str, limit_s: float) -> None:
    """Waits until a GET of this URL has status 200."""

    async def answered() -> bool:
        async with client(5) as http:
            try:
                return (await http.get(url)).status_code == 200
            except httpx.HTTPError:
                return False

    await until(answered, limit_s, 0.05)
