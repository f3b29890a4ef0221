"""Stands in for an ingress towards real workers: submits, collects tokens by index, acknowledges, says it is alive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nats
from millrace.actor.buckets import ensure_bucket
from millrace.actor.nats_client import settle
from millrace.contracts.codec import decode, encode
from millrace.contracts.ingress import FinishReason, SequencesReturned, TokenChunk, TokensGenerated, TokensResent
from millrace.contracts.message import Body
from millrace.contracts.status import InstanceSummary, PresenceState, ServicePresence
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import ResendTokens, Sampling, SubmitSequence
from nats.js.errors import KeyNotFoundError

from tests.testbed.programs import Program, start_program
from tests.testbed.waiting import until

#: Longest wait for anything in these tests, seconds.
PATIENCE_S = 60.0


class Stream:
    """One sequence's tokens, put together as ingress does."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.gaps = 0

    def take(self, chunk: TokenChunk) -> bool:
        """Appends what is new; False where tokens before it are missing."""
        skip = len(self.tokens) - chunk.first_index
        if skip < 0:
            self.gaps += 1
            return False
        self.tokens += chunk.token_ids[skip:]
        if chunk.finish is not None and chunk.first_index + len(chunk.token_ids) <= len(self.tokens):
            self.finish = chunk.finish
        return True


class FakeIngress:
    """One connection; use as ``async with FakeIngress(url, cluster) as ingress``."""

    def __init__(self, url: str, cluster: str) -> None:
        self.url, self.name = url, "i0"
        self.subjects = Subjects(cluster)
        self.incarnation = time.time_ns()
        self.streams: dict[str, Stream] = {}
        self.returned: list[SequencesReturned] = []
        self.summaries: dict[str, InstanceSummary] = {}
        self.presences: dict[str, ServicePresence] = {}

    async def __aenter__(self) -> FakeIngress:
        self._nats = await nats.connect(self.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        take = self._take
        for subject in (
            self.subjects.tokens(self.name),
            self.subjects.returned(self.name),
            self.subjects.summaries(),
            self.subjects.presences("worker"),
        ):
            await self._nats.subscribe(subject, cb=take)
        await settle(self._nats)
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._heart.cancel()
        await self._nats.close()

    async def _beat(self) -> None:
        while True:
            beat = ServicePresence(role="ingress", name=self.name, incarnation=self.incarnation, at_ns=time.time_ns())
            await self.publish(self.subjects.presence("ingress", self.name), beat)
            await asyncio.sleep(0.5)

    async def _take(self, message: Any) -> None:
        match decode(message.data):
            case TokensGenerated(chunks=chunks) as body:
                for chunk in chunks:
                    await self._take_chunk(body.instance, chunk)
            case SequencesReturned() as body:
                self.returned.append(body)
            case InstanceSummary() as body:
                self.summaries[body.instance] = body
            case ServicePresence() as body:
                self.presences[body.name] = body

    async def _take_chunk(self, instance: str, chunk: TokenChunk) -> None:
        """Asks for what is missing, as ingress does."""
        stream = self.streams.get(chunk.sequence)
        if stream is None or stream.take(chunk):
            return
        ask = ResendTokens(sequence=chunk.sequence, epoch=chunk.epoch, from_index=len(stream.tokens))
        answer = await self.request(self.subjects.engine(instance, "resend"), ask)
        if isinstance(answer, TokensResent):
            stream.take(answer.chunk)

    async def publish(self, subject: str, body: Body) -> None:
        await self._nats.publish(subject, encode(body))

    async def request(self, subject: str, body: Body, timeout_s: float = 10.0) -> Body:
        return decode((await self._nats.request(subject, encode(body), timeout=timeout_s)).data)

    async def submit(self, instance: str, sequence: str, prompt: list[int], sampling: Sampling) -> Body:
        self.streams[sequence] = Stream()
        body = SubmitSequence(
            sequence=sequence,
            epoch=0,
            ingress=self.name,
            ingress_incarnation=self.incarnation,
            prompt_token_ids=prompt,
            sampling=sampling,
        )
        return await self.request(self.subjects.engine(instance, "submit"), body)

    async def until(self, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
        """Waits until the condition holds; fails after ``patience_s``."""
        await until(condition, patience_s, 0.005)

    async def finished(self, *sequences: str) -> list[Stream]:
        await self.until(lambda: all(self.streams[sequence].finish for sequence in sequences))
        return [self.streams[sequence] for sequence in sequences]

    async def registered(self) -> set[str]:
        """Instances whose record stands in the store. Not by ``KeyValue.keys``: nats-py finds none now and then."""
        jetstream, name = self._nats.jetstream(), self.subjects.bucket("instance")
        bucket = await jetstream.key_value(name)
        known = (await jetstream.stream_info(f"KV_{name}", subjects_filter=">")).state.subjects or {}
        found = set()
        for key in (subject.removeprefix(f"$KV.{name}.") for subject in known):
            with suppress(KeyNotFoundError):  # its deletion is what stands there
                await bucket.get(key)
                found.add(key)
        return found

    async def up(self, *instances: str) -> None:
        """Waits for instances that are alive now (not only heard of before)."""
        for instance in instances:
            self.presences.pop(instance, None)
        await self.until(
            lambda: all(
                instance in self.presences and self.presences[instance].state is PresenceState.ALIVE
                for instance in instances
            )
        )


def write_config(folder: Path, name: str, url: str, cluster: str, **fields: Any) -> Path:
    """A worker's configuration file."""
    path = folder / f"{name}.json"
    content = {"name": name, "model": "m", "bus": {"cluster": cluster, "servers": [url]}, **fields}
    path.write_text(json.dumps(content))
    return path


def start_worker(config: Path) -> Program:
    """``python -m services.worker`` with its output in a file beside the configuration."""
    with config.with_suffix(".log").open("ab") as log:
        return start_program("services.worker", ["--config", str(config)], output=log)


async def create_buckets(url: str, cluster: str) -> None:
    """Create the instance bucket, as the supervisor does before any service starts."""
    client = await nats.connect(url)
    await ensure_bucket(client.jetstream(), name="instance", cluster=cluster)
    await client.close()


def ended(pid: int) -> bool:
    """Whether a process is gone, or only its entry is left for its parent to read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
