"""Watches on JetStream KV that survive a restart of the server, with or without its store.

Each watch is an ephemeral push consumer with a subscription of its own. After a reconnect, a gap in the consumer's
sequence, or silence longer than three heartbeats, it begins anew: every key is told again, keys that are gone are told
as deleted, then BucketReady.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from millrace.actor.buckets import ensure_bucket
from millrace.actor.effects import WatchKeys
from millrace.actor.headers import read_header, read_status
from millrace.actor.inbox import Deliver
from millrace.actor.nats_client import DirectClient
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.local import BucketReady, KeyChanged
from millrace.contracts.message import Message
from millrace.contracts.subjects import Subjects

#: The server says that it is alive this often on an idle watch, seconds.
HEARTBEAT_S = 2.0

#: A watch that hears nothing for this long is created anew, seconds: three heartbeats and some slack.
SILENCE_S_MAX = 7.0

#: Pause between attempts to create a watch, seconds. JetStream needs a moment after a restart.
RETRY_S = 0.25

#: The server forgets the consumer of a runtime that is gone after this long, seconds.
INACTIVE_S = 30.0


class Watch:
    """One WatchKeys effect: what the actor was told, and the consumer that feeds it now."""

    def __init__(self, *, bucket: str, deliver: Deliver, on_malformed: Callable[[MalformedMessage], None]) -> None:
        self.bucket = bucket
        self.heard_at = 0.0
        self._deliver = deliver
        self._on_malformed = on_malformed
        self._known: dict[str, int] = {}
        self._seen: set[str] = set()
        self._sequence = 0
        self._settled = False

    def begin(self, now_s: float) -> None:
        """A new consumer starts from the last value of each key."""
        self._seen = set()
        self._sequence = 0
        self._settled = False
        self.heard_at = now_s

    def take(self, key: str, ack: str, payload: bytes, headers: bytes) -> bool:
        """One stored value or deletion marker; ``ack`` is the acknowledgement subject, which carries the numbers.

        Returns False where a message is missing before this one: the watch must be created anew.
        """
        fields = ack.split(".")
        revision, sequence, pending = int(fields[-4]), int(fields[-3]), int(fields[-1])
        if sequence != self._sequence + 1:
            return False
        self._sequence = sequence
        self._seen.add(key)
        gone = bool(read_header(headers, "KV-Operation") or read_header(headers, "Nats-Marker-Reason"))
        self._tell(key, None if gone else payload, revision)
        if pending == 0:
            self.settle()
        return True

    def is_whole(self, headers: bytes) -> bool:
        """Compares a heartbeat's last sequence with ours, so that a message lost at the end is noticed too."""
        last = read_header(headers, "Nats-Last-Consumer")
        return not last or int(last) == self._sequence

    def settle(self) -> None:
        """Every key that existed has been told; what the actor knows beyond that is gone."""
        if self._settled:
            return
        self._settled = True
        for key in [key for key in self._known if key not in self._seen]:
            self._change(key, None, self._known.pop(key))
        self._deliver(Message(BucketReady(bucket=self.bucket)))

    def _tell(self, key: str, payload: bytes | None, revision: int) -> None:
        if payload is None:
            if self._known.pop(key, None) is not None:
                self._change(key, None, revision)
            return
        try:
            value = decode(payload)
        except MalformedMessage as malformed:
            self._on_malformed(malformed)
            return
        self._known[key] = revision
        self._change(key, value, revision)

    def _change(self, key: str, value: object, revision: int) -> None:
        self._deliver(Message(KeyChanged(bucket=self.bucket, key=key, value=value, revision=revision)))


class WatchFeed:
    """Keeps one Watch fed: creates its consumer, and creates it anew when it broke."""

    def __init__(self, *, watch: Watch, pattern: str, watches: Watches) -> None:
        self._watch = watch
        self._pattern = pattern
        self._watches = watches
        self._subscription: int | None = None
        self._task: asyncio.Task[None] | None = None

    def restart(self) -> None:
        """Drops the present consumer and starts another one."""
        self.stop()
        self._task = asyncio.get_running_loop().create_task(self._create())

    def stop(self) -> None:
        """Hears nothing more; the server forgets the consumer by itself."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._subscription is not None:
            self._watches.client.unsubscribe_now(self._subscription)
            self._subscription = None

    def check_silence(self, now_s: float) -> None:
        """Starts over where even heartbeats stay away."""
        creating = self._task is not None and not self._task.done()
        if not creating and now_s - self._watch.heard_at > SILENCE_S_MAX:
            self.restart()

    async def _create(self) -> None:
        while True:
            try:
                await self._create_once()
                return
            except (TimeoutError, NatsError):
                self._unsubscribe()
                await asyncio.sleep(RETRY_S)

    async def _create_once(self) -> None:
        owner = self._watches
        full_name = owner.subjects.bucket(self._watch.bucket)
        prefix = f"$KV.{full_name}."
        await ensure_bucket(owner.js, name=self._watch.bucket, full_name=full_name)
        inbox = owner.next_inbox()
        self._watch.begin(asyncio.get_running_loop().time())
        self._subscription = owner.client.subscribe_now(inbox, "", self._taker(inbox, len(prefix)))
        info = await owner.js.add_consumer(
            f"KV_{full_name}",
            ConsumerConfig(
                deliver_subject=inbox,
                deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                ack_policy=AckPolicy.NONE,
                filter_subject=prefix + self._pattern,
                idle_heartbeat=HEARTBEAT_S,
                inactive_threshold=INACTIVE_S,
                mem_storage=True,
                num_replicas=1,
            ),
        )
        delivered = info.delivered.consumer_seq if info.delivered is not None else 0
        if not info.num_pending and not delivered:
            self._watch.settle()

    def _taker(self, inbox: str, prefix_length: int) -> Callable[[str, str, bytes, bytes], None]:
        watch = self._watch

        def take(subject: str, reply: str, payload: bytes, headers: bytes) -> None:
            watch.heard_at = asyncio.get_running_loop().time()
            if subject != inbox:
                whole = watch.take(subject[prefix_length:], reply, payload, headers)
            else:
                whole = read_status(headers) == "100" and watch.is_whole(headers)
            if not whole:
                self.restart()

        return take

    def _unsubscribe(self) -> None:
        if self._subscription is not None:
            self._watches.client.unsubscribe_now(self._subscription)
            self._subscription = None


class Watches:
    """All watches of a runtime."""

    def __init__(self, *, client: DirectClient, js: JetStreamContext, subjects: Subjects, inbox_prefix: str) -> None:
        self.client = client
        self.js = js
        self.subjects = subjects
        self._inbox_prefix = inbox_prefix
        self._numbers = 0
        self._feeds: list[WatchFeed] = []

    def add(self, effect: WatchKeys, deliver: Deliver, on_malformed: Callable[[MalformedMessage], None]) -> WatchFeed:
        """Begins a watch; it is fed until end() or close()."""
        watch = Watch(bucket=effect.bucket, deliver=deliver, on_malformed=on_malformed)
        feed = WatchFeed(watch=watch, pattern=effect.pattern, watches=self)
        self._feeds.append(feed)
        feed.restart()
        return feed

    def end(self, feed: WatchFeed) -> None:
        """Ends one watch."""
        feed.stop()
        self._feeds.remove(feed)

    def reconnected(self) -> None:
        """Consumers of before the break may be gone: creates all anew."""
        for feed in self._feeds:
            feed.restart()

    def check_silence(self) -> None:
        """Called now and then by the runtime while it is connected."""
        now_s = asyncio.get_running_loop().time()
        for feed in self._feeds:
            feed.check_silence(now_s)

    def close(self) -> None:
        for feed in self._feeds:
            feed.stop()

    def next_inbox(self) -> str:
        """A delivery subject of its own for each consumer."""
        self._numbers += 1
        return f"{self._inbox_prefix}w.{self._numbers}"
