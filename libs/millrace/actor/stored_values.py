"""Reads and writes of single keys of the KV store for a service's shell. Actors watch buckets, and write by effects."""

from __future__ import annotations

import asyncio

from millrace.actor.effects import DeleteKey, PutKey
from millrace.actor.key_store import KeyStore
from millrace.actor.store_link import StoreAway, StoreLink
from millrace.contracts.codec import MalformedMessage, decode
from millrace.contracts.local import KeyFailure, KeyPut
from millrace.contracts.message import Body, Message


class KeyConflict(Exception):
    """The key does not stand at the expected revision."""


class StoredValues:
    """Keys of all buckets that this runtime's user may read and write."""

    def __init__(self, link: StoreLink, keys: KeyStore) -> None:
        self._link = link
        self._keys = keys

    async def get(self, bucket: str, key: str) -> tuple[Body | None, int]:
        """The key's value and revision; None where it has none, or one that this version cannot read.

        Raises:
            StoreAway: the store does not answer.
        """
        found: tuple[Body | None, int] = (None, 0)

        def take(key: str, revision: int, payload: bytes | None) -> None:
            nonlocal found
            try:
                found = (None if payload is None else decode(payload), revision)
            except MalformedMessage:
                found = (None, revision)

        await self._link.read_key(bucket, key, take)
        return found

    async def put(self, bucket: str, key: str, value: Body, expected: int | None = None) -> int:
        """Write the key; returns its revision.

        Args:
            expected: Revision at which it must stand, 0 where it must not exist; None for any.

        Raises:
            KeyConflict: it stands at another one.
            StoreAway: the store does not answer.
        """
        effect = PutKey(bucket=bucket, key=key, value=value, correlation="", expected_revision=expected)
        return await self._write(effect)

    async def delete(self, bucket: str, key: str) -> None:
        """Delete the key.

        Raises:
            StoreAway: the store does not answer.
        """
        await self._write(DeleteKey(bucket=bucket, key=key, correlation=""))

    async def _write(self, effect: PutKey | DeleteKey) -> int:
        written: asyncio.Future[Body] = asyncio.get_running_loop().create_future()

        def told(message: Message) -> None:
            if not written.done():
                written.set_result(message.body)

        self._keys.write(effect, told)
        answer = await written
        if isinstance(answer, KeyPut):
            return answer.revision
        if getattr(answer, "reason", None) is KeyFailure.CONFLICT:
            raise KeyConflict(effect.key)
        raise StoreAway
