"""Watches on JetStream KV that survive a restart of the server, with or without its store.

A watch listens to what the server tells of each change, and reads what stands in the bucket: all of it at first and
after a reconnect, what it missed where a revision is missing, and now and then whether it missed something. After a
reconnect every key is told again, keys that are gone are told as deleted, then BucketReady.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nats.errors import Error as NatsError

from millrace.actor.headers import read_header
from millrace.actor.inbox import Deliver
from millrace.actor.store_link import StoreAway, StoreLink, stored
from millrace.contracts.catalog import BUCKETS
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.local import BucketReady, KeyChanged, KeyUnreadable
from millrace.contracts.message import Message

#: A watch asks this often whether it has missed something, seconds.
LOOK_S = 5.0

#: Pause between attempts to reach the store, seconds. JetStream needs a moment after a restart.
RETRY_S = 0.25

_VALUES = {bucket.name: bucket.value for bucket in BUCKETS}

#: Told of a value that cannot be read: the key and why.
OnUnreadable = Callable[[str, MalformedMessage], None]


class Watch:
    """One WatchKeys effect: what the actor was told.

    Attributes:
        whole: Nothing up to this revision is missing.
    """

    def __init__(self, *, bucket: str, deliver: Deliver, on_unreadable: OnUnreadable) -> None:
        self.bucket = bucket
        self.whole = 0
        self._deliver = deliver
        self._on_unreadable = on_unreadable
        self._known: set[str] = set()
        self._revisions: dict[str, int] = {}

    def begin(self) -> None:
        """Everything is read from the start, perhaps of another store."""
        self._revisions = {}
        self.whole = 0

    def take(self, key: str, revision: int, payload: bytes | None) -> None:
        """A value that was read or told; None for a key that is gone. What is older than what is known is ignored."""
        if revision <= self._revisions.get(key, 0):
            return
        self._revisions[key] = revision
        if payload is not None:
            self._tell(key, payload, revision)
        elif key in self._known:
            self._known.remove(key)
            self._change(key, None, revision)

    def settle(self) -> None:
        """Every key that exists has been told; what the actor knows beyond that is gone."""
        for key in sorted(self._known - self._revisions.keys()):
            self._known.remove(key)
            self._change(key, None, 0)
        self._deliver(Message(BucketReady(bucket=self.bucket)))

    def _tell(self, key: str, payload: bytes, revision: int) -> None:
        try:
            value = decode(payload)
            if not isinstance(value, _VALUES.get(self.bucket, object)):
                raise MalformedMessage("unexpected", f"{value.type_name()} is no value of {self.bucket}")
        except MalformedMessage as malformed:
            self._on_unreadable(key, malformed)
            self._deliver(Message(KeyUnreadable(bucket=self.bucket, key=key, revision=revision)))
            return
        self._known.add(key)
        self._change(key, value, revision)

    def _change(self, key: str, value: object, revision: int) -> None:
        self._deliver(Message(KeyChanged(bucket=self.bucket, key=key, value=value, revision=revision)))


class WatchFeed:
    """Keeps one Watch fed."""

    def __init__(self, watch: Watch, link: StoreLink) -> None:
        self._watch = watch
        self._link = link
        self._missed = asyncio.Event()
        self._prefix = link.subjects.changes(watch.bucket)
        self._subscription: int | None = None
        self._task: asyncio.Task[None] | None = None

    def restart(self) -> None:
        """Reads everything anew."""
        if self._subscription is None:
            self._subscription = self._link.connection.client.subscribe_now(f"{self._prefix}>", "", self._on_change)
        self._end_task()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    def stop(self) -> None:
        """Hears nothing more."""
        self._end_task()
        if self._subscription is not None:
            self._link.connection.client.unsubscribe_now(self._subscription)
            self._subscription = None

    def _end_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _follow(self) -> None:
        while True:
            try:
                self._watch.begin()
                await self._read()
                self._watch.settle()
                while True:
                    await self._until_look()
                    await self._read()
            except StoreAway as away:
                if away.no_bucket and await self._make_bucket():
                    continue
            await asyncio.sleep(RETRY_S)

    async def _until_look(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):  # wait_for may lose a cancellation: this would follow for ever
                await self._missed.wait()
        except TimeoutError:
            pass

    async def _read(self) -> None:
        """Reads from where nothing is missing to the end."""
        self._missed.clear()
        watch = self._watch

        def take(key: str, revision: int, payload: bytes | None) -> None:
            watch.whole = max(watch.whole, revision)
            watch.take(key, revision, payload)

        while await self._link.read(watch.bucket, watch.whole + 1, take):
            pass

    async def _make_bucket(self) -> bool:
        try:
            return await self._link.make_bucket(self._watch.bucket)
        except (TimeoutError, NatsError):
            return False  # tried again with the next read

    def _on_change(self, subject: str, reply: str, payload: bytes, headers: bytes) -> None:
        revision = int(read_header(headers, "Nats-Sequence"))
        watch = self._watch
        if revision == watch.whole + 1:
            watch.whole = revision
        elif revision > watch.whole:
            self._missed.set()
        watch.take(subject[len(self._prefix) :], revision, stored(payload, headers))


class Watches:
    """All watches of a runtime."""

    def __init__(self, link: StoreLink) -> None:
        self._link = link
        self._feeds: list[WatchFeed] = []

    def add(self, bucket: str, deliver: Deliver, on_unreadable: OnUnreadable) -> WatchFeed:
        """Begins a watch; it is fed until end() or close()."""
        feed = WatchFeed(Watch(bucket=bucket, deliver=deliver, on_unreadable=on_unreadable), self._link)
        self._feeds.append(feed)
        feed.restart()
        return feed

    def end(self, feed: WatchFeed) -> None:
        feed.stop()
        self._feeds.remove(feed)

    def reconnected(self) -> None:
        """Changes during the break are lost: reads all anew."""
        for feed in self._feeds:
            feed.restart()

    def close(self) -> None:
        for feed in self._feeds:
            feed.stop()
