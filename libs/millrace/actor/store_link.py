"""A runtime's way to the KV store: a connection of its own where the server has users, reads, and its own inbox.

Reads and writes answer to this connection's inbox, in an account where nothing else can be reached
(``millrace.supervision.nats_config``). A server without users has one account, and one connection does both.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from nats.js import JetStreamContext

from millrace.actor.bucket_reading import question
from millrace.actor.buckets import ensure_bucket
from millrace.actor.connection import Connection
from millrace.actor.headers import read_header, read_status
from millrace.actor.inbox import Inbox
from millrace.contracts.message import Body
from millrace.contracts.permissions import key_subject, read_subject
from millrace.contracts.subjects import Subjects

#: How long one read waits for its last value, seconds.
READ_TIMEOUT_S = 5.0

#: JetStream's calls of a runtime that makes its own buckets give up after this long, seconds.
CREATE_TIMEOUT_S = 2.0

#: Takes a key, its revision and its value; None where it was deleted or has expired.
TakeValue = Callable[[str, int, bytes | None], None]


class StoreAway(Exception):
    """The store does not answer. ``no_bucket``: the server does, and nobody there has the bucket."""

    def __init__(self, *, no_bucket: bool = False) -> None:
        super().__init__("no such bucket" if no_bucket else "no answer")
        self.no_bucket = no_bucket


class OpenRead:
    """A read that waits for its values.

    Attributes:
        ended: Whether more values stand behind those that came. Raises StoreAway.
    """

    def __init__(self, prefix: str, take: TakeValue, *, single: bool) -> None:
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._prefix = prefix
        self._take = take
        self._single = single

    def on_message(self, subject_reply: str, payload: bytes, headers: bytes) -> bool:
        if self.ended.done():
            return True  # whoever asked has gone
        status = read_status(headers)
        if not status:
            key = read_header(headers, "Nats-Subject").removeprefix(self._prefix)
            self._take(key, int(read_header(headers, "Nats-Sequence")), stored(payload, headers))
            if self._single:
                self.ended.set_result(False)
            return self._single
        if status in ("204", "404"):
            self.ended.set_result(read_header(headers, "Nats-Num-Pending") not in ("", "0"))
        else:
            self.ended.set_exception(StoreAway(no_bucket=status == "503"))
        return True

    def on_answer(self, sender: str, body: Body, traceparent: str) -> bool:
        return False  # the server alone answers for its store

    def on_timeout(self) -> None:
        self.on_disconnect()

    def on_disconnect(self) -> bool:
        if not self.ended.done():
            self.ended.set_exception(StoreAway())
        return True


def stored(payload: bytes, headers: bytes) -> bytes | None:
    """The value of a stored message; None for the marker of a key that was deleted or has expired."""
    gone = read_header(headers, "KV-Operation") or read_header(headers, "Nats-Marker-Reason")
    return None if gone else payload


class StoreLink:
    """Connection, inbox and subjects of all reads and writes of a runtime."""

    def __init__(
        self, connection: Connection, subjects: Subjects, count_late: Callable[[], None], *, makes_buckets: bool
    ) -> None:
        """``makes_buckets``: Whether this user may, as on a server without users; elsewhere the supervisor does."""
        self.connection = connection
        self.subjects = subjects
        self.inbox = Inbox(f"{connection.inbox_prefix}s.", count_late)
        client = connection.client
        self._js: JetStreamContext | None = client.jetstream(timeout=CREATE_TIMEOUT_S) if makes_buckets else None

    def open(self) -> None:
        """Listens to answers, from the first connection on."""
        self.connection.client.subscribe_now(self.inbox.prefix + "*", "", self.inbox.take)

    async def make_bucket(self, bucket: str) -> bool:
        """Whether it is there now.

        Raises:
            nats.errors.Error, TimeoutError: the server does not make it.
        """
        if self._js is None:
            return False
        await ensure_bucket(self._js, name=bucket, cluster=self.subjects.cluster)
        return True

    async def read(self, bucket: str, revision: int, take: TakeValue) -> bool:
        """Gives some values from a revision on to ``take``; whether there are more.

        Raises:
            StoreAway: the store does not answer.
        """
        return await self._ask(bucket, question(self.subjects.bucket(bucket), revision), take, single=False)

    async def read_key(self, bucket: str, key: str, take: TakeValue) -> None:
        """Gives one key's value to ``take``, where it has one.

        Raises:
            StoreAway: the store does not answer.
        """
        subject = f"{key_subject(self.subjects, bucket)}.{key}"
        await self._ask(bucket, json.dumps({"last_by_subj": subject}).encode(), take, single=True)

    async def _ask(self, bucket: str, payload: bytes, take: TakeValue, *, single: bool) -> bool:
        if not self.connection.connected:
            raise StoreAway
        waiting = OpenRead(f"{key_subject(self.subjects, bucket)}.", take, single=single)
        reply = self.inbox.ask(waiting, READ_TIMEOUT_S)
        if not self.connection.send(read_subject(self.subjects, bucket), reply, b"NATS/1.0\r\n\r\n", payload):
            self.inbox.close(reply)
            raise StoreAway
        return await waiting.ended
