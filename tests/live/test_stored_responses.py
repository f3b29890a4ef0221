"""Responses that are stored: asked for again, gone on with, made in the background, taken over by another ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from millrace.actor.store_link import StoreAway
from millrace.actor.stored_values import KeyConflict
from millrace.contracts.keyfile import KeyFile, KeyRecord, format_key_file, hash_key
from millrace.contracts.responses import ResponseEvents, StoredResponse

from services.ingress.http.keys import ApiKeyStore
from tests.live.ingress_rig import MemoryValues, Rig, served
from tests.testbed.waiting import until

ASK: Any = {"model": "tiny", "input": "hi"}


@asynccontextmanager
async def ingress(
    folder: Path,
    values: MemoryValues | None,
    *,
    owner: str = "a.1",
    keys: ApiKeyStore | None = None,
    key: str = "none",
    lost_s: float = 0.2,
) -> AsyncIterator[tuple[Rig, openai.AsyncOpenAI]]:
    """One ingress, with a client of it."""
    async with (
        served(folder / owner, values=values, owner=owner, keys=keys, lost_s=lost_s) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield rig, client
        assert not rig.bugs


async def events_of(stream: Any) -> list[dict[str, Any]]:
    return [event.model_dump() async for event in stream]


async def ended(client: openai.AsyncOpenAI, identity: str) -> Any:
    async def end() -> Any:
        found = await client.responses.retrieve(identity)
        return found if found.status not in ("queued", "in_progress") else None

    return await until(end, look_s=0.02)


async def test_what_is_asked_while_the_store_elects_a_leader_waits_for_it(tmp_path: Path):
    values = MemoryValues()
    async with ingress(tmp_path, values) as (_, client):

        async def meanwhile(asked: Any) -> Any:
            values.away = True
            asyncio.get_running_loop().call_later(0.3, setattr, values, "away", False)
            return await asked

        answer = await meanwhile(client.responses.create(**ASK, max_output_tokens=2))
        assert answer.store
        assert await meanwhile(client.responses.retrieve(answer.id)) == answer
        assert (
            await meanwhile(client.responses.create(**ASK, background=True, max_output_tokens=2))
        ).status == "queued"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_asked_for_again_gone_on_with_and_deleted(tmp_path: Path, stream: bool):
    async with ingress(tmp_path, MemoryValues()) as (rig, client):
        answer: Any = await client.responses.create(**ASK, instructions="be brief", max_output_tokens=2, stream=stream)
        if stream:
            answer = [event async for event in answer][-1].response
        assert answer.store
        assert await client.responses.retrieve(answer.id) == answer
        await client.responses.create(model="tiny", input="more", previous_response_id=answer.id, max_output_tokens=2)
        head = rig.core.calls[-1].prompt_head
        assert head == "<|user|>hi<|end|><|assistant|>w0 w1 <|end|><|user|>more<|end|><|assistant|>"
        await client.responses.delete(answer.id)
        for asked in (
            client.responses.retrieve(answer.id),
            client.responses.create(**ASK, previous_response_id=answer.id),
        ):
            with pytest.raises(openai.NotFoundError, match=f"Response with id {answer.id} not found"):
                await asked


async def test_what_is_not_stored_says_so_and_is_not_found(tmp_path: Path):
    values = MemoryValues()
    async with ingress(tmp_path, values) as (_, client):
        unwanted = await client.responses.create(**ASK, store=False, max_output_tokens=2)
        values.away = True
        lost = await client.responses.create(**ASK, max_output_tokens=2)
        values.away = False
        for answer in (unwanted, lost):
            assert answer.store is False
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="background can only be used when `store` is true"):
            await client.responses.create(**ASK, background=True, store=False)


async def test_a_cluster_that_stores_none_says_so(tmp_path: Path):
    async with (
        served(tmp_path, stored=False) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.responses.create(**ASK, store=True, max_output_tokens=2)
        assert answer.store is False
        for asked in (
            client.responses.retrieve(answer.id),
            client.responses.create(**ASK, previous_response_id=answer.id),
            client.responses.create(**ASK, background=True),
        ):
            with pytest.raises(openai.BadRequestError, match="stores no responses"):
                await asked


async def test_a_response_is_found_with_its_own_key_only(tmp_path: Path):
    file = tmp_path / "keys"
    records = [KeyRecord(name=name, sha256=hash_key(name.encode())) for name in ("ada", "ben")]
    file.write_text(format_key_file(KeyFile(keys=records)))
    keys, values = ApiKeyStore(str(file)), MemoryValues()
    async with ingress(tmp_path, values, keys=keys, key="ada") as (_, client):
        answer = await client.responses.create(**ASK, max_output_tokens=2)
        other = client.with_options(api_key="ben")
        for asked in (other.responses.retrieve(answer.id), other.responses.delete(answer.id)):
            with pytest.raises(openai.NotFoundError):
                await asked
        assert (await client.responses.retrieve(answer.id)).id == answer.id


async def test_a_response_in_the_background_is_queued_then_complete_or_failed(tmp_path: Path):
    async with ingress(tmp_path, MemoryValues()) as (_, client):
        queued = await client.responses.create(**ASK, background=True, max_output_tokens=3)
        assert (queued.status, queued.background) == ("queued", True)
        done = await ended(client, queued.id)
        assert (done.id, done.status, done.output_text) == (queued.id, "incomplete", "w0 w1 w2 ")
        assert await client.responses.cancel(queued.id) == done
        queued = await client.responses.create(**ASK, background=True, max_output_tokens=10**6)
        failed = await ended(client, queued.id)
        assert failed.status == "failed"
        assert "maximum context length" in failed.error.message


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_one_that_is_cancelled_stops_its_call_and_stays_so(tmp_path: Path, elsewhere: bool):
    values = MemoryValues()
    async with ingress(tmp_path, values) as (rig, client), ingress(tmp_path, values, owner="b.1") as (_, other):
        rig.core.pace_s = 0.05
        stream = await client.responses.create(**ASK, background=True, stream=True)
        identity = (await anext(aiter(stream))).response.id
        cancelled = await (other if elsewhere else client).responses.cancel(identity)
        assert cancelled.status == "cancelled"
        async for _ in stream:  # it ends
            pass
        await until(lambda: rig.core.abandoned)
        assert [told.request for told in rig.core.abandoned] == [rig.core.calls[0].request]
        assert (await client.responses.retrieve(identity)).status == "cancelled"
        assert (await client.responses.cancel(identity)).status == "cancelled"


async def test_a_stream_goes_on_from_any_event(tmp_path: Path):
    async with ingress(tmp_path, MemoryValues()) as (_, client):
        stream = await client.responses.create(**ASK, background=True, stream=True, max_output_tokens=4)
        whole = await events_of(stream)
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        identity = whole[0]["response"]["id"]
        for after in range(len(whole)):
            again = await client.responses.retrieve(identity, stream=True, starting_after=after)
            assert await events_of(again) == whole[after + 1 :]
        answer = await client.responses.create(**ASK, max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="made in the background"):
            await client.responses.retrieve(answer.id, stream=True)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await client.responses.cancel(answer.id)


class DeadStore(MemoryValues):
    """A store that an ingress which died does not reach any more."""

    def __init__(self, shared: MemoryValues) -> None:
        super().__init__()
        self.kept = shared.kept
        self._shared = shared

    async def put(self, bucket: str, key: str, value: Any, expected: int | None = None) -> int:
        await self._answer()
        return await self._shared.put(bucket, key, value, expected)


@pytest.mark.parametrize("seen", [0, 3, 9])
async def test_another_ingress_goes_on_with_the_stream_of_one_that_died(tmp_path: Path, seen: int):
    values = MemoryValues()
    first = DeadStore(values)
    async with ingress(tmp_path, first) as (rig, client), ingress(tmp_path, values, owner="b.1") as (heir, other):
        rig.core.pace_s = heir.core.pace_s = 0.01
        stream = await client.responses.create(**ASK, background=True, stream=True, max_output_tokens=30)
        events = list[dict[str, Any]]()
        async for event in stream:
            events.append(event.model_dump())
            if event.sequence_number == seen:
                break
        first.away = True
        identity = events[0]["response"]["id"]
        rest = await other.responses.retrieve(identity, stream=True, starting_after=events[-1]["sequence_number"])
        events += await events_of(rest)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        text = "".join(f"w{i} " for i in range(30))
        assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == text
        done = await other.responses.retrieve(identity)
        assert (done.status, done.output_text, done.created_at) == (
            "incomplete",
            text,
            events[0]["response"]["created_at"],
        )
        (call,) = heir.core.calls
        assert call.begun == list(range(len(call.begun)))


async def test_events_that_gave_way_are_told_and_what_goes_on_after_them_fails(tmp_path: Path):
    values = MemoryValues()
    first = DeadStore(values)
    async with ingress(tmp_path, first) as (rig, client), ingress(tmp_path, values, owner="b.1") as (_, other):
        done = await client.responses.create(**ASK, background=True, max_output_tokens=3)
        whole = await ended(client, done.id)
        rig.core.pace_s = 0.05
        begun = await client.responses.create(**ASK, background=True, max_output_tokens=10**3)
        await until(lambda: ("response_log", f"{begun.id}.2") in values.kept)
        for identity in (done.id, begun.id):
            del values.kept["response_log", f"{identity}.0"]
        with pytest.raises(openai.APIError, match="ask for it without `stream`"):
            await events_of(await client.responses.retrieve(done.id, stream=True))
        assert await client.responses.retrieve(done.id) == whole
        first.away = True
        failed = await ended(other, begun.id)
        assert (failed.status, failed.error.message[:23]) == ("failed", "Its first events were n")


async def test_a_response_that_is_being_made_is_stored_again_before_and_after_it_gives_way_to_others(tmp_path: Path):
    values = MemoryValues()
    async with ingress(tmp_path, values) as (rig, client):
        rig.core.pace_s = 0.05
        queued = await client.responses.create(**ASK, background=True)
        key = ("response", queued.id)
        await until(lambda: values.kept[key][0].status == "in_progress")
        stored = values.kept[key]
        await until(lambda: values.kept[key] != stored, look_s=0.1)
        assert values.kept[key][0] == stored[0]
        del values.kept[key]
        await until(lambda: key in values.kept, look_s=0.01)
        assert (await client.responses.retrieve(queued.id)).status == "in_progress"
        del values.kept[key]  # so many are being made that they take all the room
        await until(lambda: rig.core.abandoned, look_s=0.1)
        assert key not in values.kept


class LostAck(MemoryValues):
    """A store that takes a chunk and dies before it says so."""

    async def put(self, bucket: str, key: str, value: Any, expected: int | None = None) -> int:
        new = (bucket, key) not in self.kept
        revision = await super().put(bucket, key, value, expected)
        if new and key.endswith(".1"):
            raise StoreAway
        return revision


async def test_events_that_were_read_and_not_acknowledged_are_followed_by_the_next(tmp_path: Path):
    async with ingress(tmp_path, LostAck(), owner="a") as (rig, client):
        rig.core.pace_s = 0.05
        events = await events_of(
            await client.responses.create(**ASK, background=True, stream=True, max_output_tokens=40)
        )
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "".join(f"w{i} " for i in range(40))


class GoneOnce(DeadStore):
    """A store that goes away once, when a response has been taken over."""

    def __init__(self, shared: MemoryValues) -> None:
        super().__init__(shared)
        self.gone = 0

    async def get(self, bucket: str, key: str) -> Any:
        owners = [body.owner for body, _ in self.kept.values() if isinstance(body, StoredResponse)]
        if owners == ["b.1"] and key.endswith(".0") and not self.gone:
            self.gone += 1
            raise StoreAway
        return await super().get(bucket, key)


@pytest.mark.parametrize("status", ["incomplete", "failed"])
async def test_what_an_ingress_took_over_as_it_lost_the_store_ends_though_nobody_asks_again(tmp_path, status: str):
    values = MemoryValues()
    first, second = DeadStore(values), GoneOnce(values)
    async with ingress(tmp_path, first) as (rig, client), ingress(tmp_path, second, owner="b.1") as (_, other):
        rig.core.pace_s = 0.05
        queued = await client.responses.create(**ASK, background=True, max_output_tokens=30)
        first.away = True
        if status == "failed":
            (body, revision) = values.kept["response", queued.id]
            served_no_more = msgspec.structs.replace(body, request=body.request.replace(b"tiny", b"gone"))
            values.kept["response", queued.id] = served_no_more, revision

        async def taken() -> bool:
            await other.responses.retrieve(queued.id)
            return second.gone > 0

        await until(taken, look_s=0.05)
        await until(lambda: values.kept["response", queued.id][0].status == status)
        found = await other.responses.retrieve(queued.id)
        assert found.output_text == "".join(f"w{i} " for i in range(30 if status == "incomplete" else 0))
        assert found.error is None or "`gone`" in found.error.message


class LateEnd(DeadStore):
    """A store that takes a response's end long after the events which end it, or never."""

    def __init__(self, shared: MemoryValues) -> None:
        super().__init__(shared)
        self.ends = asyncio.Event()

    async def put(self, bucket: str, key: str, value: Any, expected: int | None = None) -> int:
        if isinstance(value, StoredResponse) and value.status == "incomplete":
            self.ends.set()
            await asyncio.sleep(0.5)
        return await super().put(bucket, key, value, expected)


class CancelledStore(DeadStore):
    """A store in which a response was cancelled just before it ends."""

    async def put(self, bucket: str, key: str, value: Any, expected: int | None = None) -> int:
        if isinstance(value, StoredResponse) and value.status == "incomplete":
            document = msgspec.json.encode(msgspec.json.decode(value.document) | {"status": "cancelled"})
            cancelled = msgspec.structs.replace(value, status="cancelled", document=document)
            await super().put(bucket, key, cancelled, expected)
            raise KeyConflict(key)
        return await super().put(bucket, key, value, expected)


async def test_a_response_that_is_cancelled_as_another_ingress_ends_it_stays_cancelled(tmp_path: Path):
    values = MemoryValues()
    first = LateEnd(values)
    async with ingress(tmp_path, first) as (_, client), ingress(tmp_path, CancelledStore(values), owner="b.1") as pair:
        queued = await client.responses.create(**ASK, background=True, max_output_tokens=3)
        await first.ends.wait()
        first.away = True
        await events_of(await pair[1].responses.retrieve(queued.id, stream=True))
        assert (await pair[1].responses.retrieve(queued.id)).status == "cancelled"


@pytest.mark.parametrize("dies", [False, True])
async def test_a_reader_elsewhere_sees_the_end_of_a_response_whose_ingress_dies_as_it_ends(tmp_path: Path, dies: bool):
    values = MemoryValues()
    first = LateEnd(values)
    async with ingress(tmp_path, first) as (_, client), ingress(tmp_path, values, owner="b.1") as (heir, other):
        queued = await client.responses.create(**ASK, background=True, max_output_tokens=3)
        await first.ends.wait()
        assert any(isinstance(value, ResponseEvents) and value.last for value, _ in values.kept.values())
        first.away = dies
        events = await events_of(await other.responses.retrieve(queued.id, stream=True))
        assert events[-1]["type"] == "response.incomplete"
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        done = await other.responses.retrieve(queued.id)
        assert text == "w0 w1 w2 " == done.output_text
        assert done.status == "incomplete"
        assert not heir.core.calls, "nothing is computed again"
