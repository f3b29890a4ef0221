"""Writes to JetStream KV through the runtime's own inbox, so that they leave in the order of the actor's effects."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from nats.errors import Error as NatsError

from millrace.actor.effects import DeleteKey, PutKey
from millrace.actor.headers import read_status
from millrace.actor.inbox import Deliver
from millrace.actor.store_link import StoreAway, StoreLink
from millrace.contracts.codec import PAYLOAD_BYTES_MAX, encode
from millrace.contracts.local import KeyFailure, KeyNotPut, KeyPut
from millrace.contracts.message import Body, Message
from millrace.contracts.permissions import key_subject

#: How long a write waits for the store, seconds. Electing a new stream leader was measured at 5.3 s.
WRITE_TIMEOUT_S = 8.0

#: JetStream's error codes for "wrong last sequence".
_CONFLICTS = (10071, 10164)
_KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class _Problem(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct):
    seq: int = 0
    error: _Problem | None = None


_ack_decoder = msgspec.json.Decoder(_Ack)


@dataclass(slots=True, eq=False)
class OpenWrite:
    """One write that waits for the store's acknowledgement."""

    store: KeyStore
    effect: PutKey | DeleteKey
    deliver: Deliver
    retried: bool = False
    found: int = 0  # revision that stood in the way

    def on_message(self, subject_reply: str, payload: bytes, headers: bytes) -> bool:
        if read_status(headers) == "503":
            self.store.wait_for_bucket(self)
            return True
        try:
            ack = _ack_decoder.decode(payload)
        except msgspec.DecodeError:
            self.fail(KeyFailure.UNAVAILABLE)
            return True
        if ack.error is None:
            self.deliver(Message(KeyPut(correlation=self.effect.correlation, revision=ack.seq)))
        elif ack.error.err_code not in _CONFLICTS:
            self.fail(KeyFailure.UNAVAILABLE)
        elif self.effect.expected_revision == 0 and not self.retried:
            self.retried = True
            self.found = _revision_in(ack.error.description)
            self.store.spawn(self.store.retry_over_tombstone(self))
        else:
            self.fail(KeyFailure.CONFLICT)
        return True

    def on_answer(self, sender: str, body: Body, traceparent: str) -> bool:
        return False  # the server alone answers for its store

    def on_timeout(self) -> None:
        self.fail(KeyFailure.UNAVAILABLE)

    def on_disconnect(self) -> bool:
        self.fail(KeyFailure.UNAVAILABLE)
        return True

    def fail(self, reason: KeyFailure) -> None:
        self.deliver(Message(KeyNotPut(correlation=self.effect.correlation, reason=reason)))


class KeyStore:
    """Carries out PutKey and DeleteKey."""

    def __init__(self, link: StoreLink, spawn: Spawn) -> None:
        self._link = link
        self.spawn = spawn
        self._waiting: dict[str, list[OpenWrite]] = {}

    def write(self, effect: PutKey | DeleteKey, deliver: Deliver) -> None:
        """Sends the write; KeyPut or KeyNotPut is delivered once."""
        assert _KEY.fullmatch(effect.key), f"{effect.key!r} is no key: build keys with subject_token()"
        question = OpenWrite(self, effect, deliver)
        waiting = self._waiting.get(effect.bucket)
        if waiting is not None:
            waiting.append(question)  # not past those that wait for the bucket
        else:
            self._write(question, effect.expected_revision)

    def _write(self, question: OpenWrite, expected: int | None) -> None:
        effect = question.effect
        headers = b"NATS/1.0\r\n"
        payload = b""
        if isinstance(effect, DeleteKey):
            headers += b"KV-Operation: DEL\r\n"
        else:
            payload = encode(effect.value)
            assert len(payload) <= PAYLOAD_BYTES_MAX, f"{effect.key} is too large for a message"
        if expected is not None:
            headers += f"Nats-Expected-Last-Subject-Sequence: {expected}\r\n".encode()
        subject = f"{key_subject(self._link.subjects, effect.bucket)}.{effect.key}"
        reply = self._link.inbox.ask(question, WRITE_TIMEOUT_S)
        if not self._link.connection.send(subject, reply, headers + b"\r\n", payload):
            self._link.inbox.close(reply)
            question.fail(KeyFailure.UNAVAILABLE)

    def wait_for_bucket(self, question: OpenWrite) -> None:
        """Nobody takes writes of that bucket: it is created where this user may, then all that wait are sent in
        order, once.
        """
        bucket = question.effect.bucket
        if question.retried:
            question.fail(KeyFailure.UNAVAILABLE)
        elif bucket in self._waiting:
            self._waiting[bucket].append(question)
        else:
            self._waiting[bucket] = [question]
            self.spawn(self._create_bucket(bucket))

    async def _create_bucket(self, bucket: str) -> None:
        try:
            created = await self._link.make_bucket(bucket)
        except (NatsError, TimeoutError):
            created = False
        for question in self._waiting.pop(bucket):
            question.retried = True
            if created:
                self._write(question, question.effect.expected_revision)
            else:
                question.fail(KeyFailure.UNAVAILABLE)

    async def retry_over_tombstone(self, question: OpenWrite) -> None:
        """A create met something: where it is only the marker of a deleted key, writes over exactly that marker."""
        deleted: list[int] = []

        def take(key: str, revision: int, payload: bytes | None) -> None:
            if payload is None:
                deleted.append(revision)

        try:
            await self._link.read_key(question.effect.bucket, question.effect.key, take)
        except StoreAway:
            question.fail(KeyFailure.UNAVAILABLE)
            return
        if deleted and question.found in {0, deleted[0]}:
            self._write(question, deleted[0])
        else:
            question.fail(KeyFailure.CONFLICT)


def _revision_in(description: str) -> int:
    """Revision named by "wrong last sequence: 5"; 0 where the server names none."""
    digits = description.rpartition(":")[2].strip()
    return int(digits) if digits.isdigit() else 0
