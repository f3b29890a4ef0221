"""Reading the KV store for tables of the cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from millrace.actor.bucket_reading import BucketUnreadable, read_bucket
from millrace.cli import listening
from millrace.cli.cluster import ConnectionSettings
from nats.aio.client import Client

END = ({"Status": "204"}, b"")
CONNECTION = ConnectionSettings(cluster="c", url="nats://nowhere", user="", password="", origin="test")


class FakeClient:
    """Answers one direct get with the given messages; a second one would hear nothing."""

    def __init__(self, *messages: tuple[dict[str, str], bytes]) -> None:
        self._messages = list(messages)
        self.asked: list[tuple[str, Any]] = []
        self.subscribed = False

    def new_inbox(self) -> str:
        return "_INBOX.observer.1"

    async def subscribe(self, _: str) -> FakeClient:
        self.subscribed = True
        return self

    async def unsubscribe(self) -> None:
        self.subscribed = False

    async def publish(self, subject: str, payload: bytes, *, reply: str) -> None:
        assert reply == "_INBOX.observer.1"
        self.asked.append((subject, json.loads(payload)))

    async def next_msg(self, _: float) -> SimpleNamespace:
        if not self._messages:
            raise TimeoutError
        headers, data = self._messages.pop(0)
        return SimpleNamespace(headers=headers, data=data)


def value(revision: int, payload: bytes, headers: dict[str, str] | None = None) -> tuple[dict[str, str], bytes]:
    return {**(headers or {}), "Nats-Sequence": str(revision)}, payload


async def values_of(client: FakeClient) -> list[bytes]:
    values = await read_bucket(cast(Client, client), "b")
    assert not client.subscribed
    return values


async def test_values_of_a_bucket_are_read_until_none_is_left() -> None:
    more = ({"Status": "204", "Nats-Num-Pending": "1"}, b"")
    client = FakeClient(value(3, b"a"), value(5, b"b"), more, value(8, b"c"), END)
    assert await values_of(client) == [b"a", b"b", b"c"]
    assert {subject for subject, _ in client.asked} == {"$JS.API.DIRECT.GET.KV_b"}
    assert [(asked["seq"], asked["next_by_subj"]) for _, asked in client.asked] == [(1, "$KV.b.>"), (6, "$KV.b.>")]


async def test_deleted_and_expired_keys_are_left_out_and_an_empty_bucket_has_none() -> None:
    deleted, expired = {"KV-Operation": "DEL"}, {"Nats-Marker-Reason": "MaxAge"}
    assert await values_of(FakeClient(value(1, b"", deleted), value(2, b"", expired), value(3, b"a"), END)) == [b"a"]
    assert await values_of(FakeClient(({"Status": "404"}, b""))) == []


@pytest.mark.parametrize("messages", [[], [({"Nats-Sequence": "1"}, b"a")], [({"Status": "503"}, b"")]])
async def test_an_answer_that_breaks_off_or_is_refused_is_no_empty_bucket(
    messages: list[tuple[dict[str, str], bytes]],
) -> None:
    client = FakeClient(*messages)
    with pytest.raises(BucketUnreadable):
        await read_bucket(cast(Client, client), "b")
    assert not client.subscribed


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
    async with listening.listen(CONNECTION):
        await asyncio.sleep(0)
    assert events == ["watch ended", "bus closed", "bus closed"]


@pytest.mark.parametrize("turns", range(6))
async def test_the_watch_ends_also_where_the_store_answers_in_that_moment(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def read(*_: Any) -> list[bytes]:
        asked.set()
        await answered.wait()
        answered.clear()
        return []

    @asynccontextmanager
    async def open_bus(*_: Any, **__: Any) -> AsyncIterator[AsyncMock]:
        yield AsyncMock()

    monkeypatch.setattr(listening, "open_bus", open_bus)
    monkeypatch.setattr(listening, "read_bucket", read)
    monkeypatch.setattr(listening, "time", SimpleNamespace(time_ns=lambda: 0))
    monkeypatch.setattr(listening, "STORE_TIMEOUT_S", 60.0)
    async with asyncio.timeout(5):
        async with listening.listen(CONNECTION):
            await asked.wait()
            answered.set()
            for _ in range(turns):
                await asyncio.sleep(0)
