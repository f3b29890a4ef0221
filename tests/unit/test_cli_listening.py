"""Reading the KV store for tables of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from millrace.cli import listening
from millrace.cli.cluster import Connection
from millrace.cli.listening import EMPTY_MAX, read_values
from nats.js.kv import KeyValue


class FakeBucket:
    """Answers each watch with what it was given for it, and then as nats-py does: None."""

    def __init__(self, answers: list[list[bytes]], *, messages: int) -> None:
        self._answers = answers
        self._messages = messages
        self.watches = 0

    async def watchall(self, **_: Any) -> FakeWatcher:
        self.watches += 1
        return FakeWatcher(self._answers[min(self.watches, len(self._answers)) - 1])

    async def status(self) -> SimpleNamespace:
        return SimpleNamespace(values=self._messages)


class FakeWatcher:
    def __init__(self, values: list[bytes]) -> None:
        self._values = values

    async def __aiter__(self) -> AsyncIterator[SimpleNamespace | None]:
        for value in self._values:
            yield SimpleNamespace(value=value)
        yield None

    async def stop(self) -> None:
        pass


async def values_of(bucket: FakeBucket) -> list[bytes]:
    return await read_values(cast(KeyValue, bucket))


async def test_every_value_of_a_bucket_is_read_at_once() -> None:
    bucket = FakeBucket([[b"a", b"b"]], messages=2)
    assert await values_of(bucket) == [b"a", b"b"]
    assert bucket.watches == 1


async def test_a_bucket_that_is_said_to_be_empty_and_is_not_is_read_again() -> None:
    bucket = FakeBucket([[], [], [b"a"]], messages=1)
    assert await values_of(bucket) == [b"a"]


async def test_an_empty_bucket_is_read_once() -> None:
    bucket = FakeBucket([[]], messages=0)
    assert await values_of(bucket) == []
    assert bucket.watches == 1


async def test_a_bucket_of_deletions_alone_is_empty_in_the_end() -> None:
    bucket = FakeBucket([[]], messages=3)
    assert await values_of(bucket) == []
    assert bucket.watches == EMPTY_MAX


async def test_the_watch_of_the_store_ends_while_the_bus_is_still_open(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def subscribe(*_: Any, **__: Any) -> None:
        pass

    @asynccontextmanager
    async def open_bus(*_: Any, **__: Any) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(subscribe=subscribe)
        events.append("bus closed")

    async def follow(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await subscribe()
            events.append("watch ended")

    monkeypatch.setattr(listening, "open_bus", open_bus)
    monkeypatch.setattr(listening, "_follow_store", follow)
    connection = Connection(cluster="c", url="nats://nowhere", user="", password="", origin="test")
    async with listening.listen(connection):
        await asyncio.sleep(0)
    assert events == ["watch ended", "bus closed"]
