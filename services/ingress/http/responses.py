"""Responses as clients ask for them again: stored, chained, cancelled, made in the background, gone on with.

A response that is made in the background belongs to the ingress that began it. One that finds its owner without a
sign of life for ``LOST_S`` takes it over when somebody asks for it: the call goes on after the tokens in the log, and
its events after those in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar
from urllib.parse import parse_qs

import msgspec
from millrace.actor.store_link import StoreAway
from millrace.actor.stored_values import KeyConflict
from millrace.contracts.responses import ResponseEvents, StoredResponse
from millrace.http.exchange import Exchange, HttpRequest
from msgspec.structs import replace

from services.ingress.api.answer_forms import Keep, hand_on
from services.ingress.api.decoding import decode_body
from services.ingress.api.errors import SERVER, ApiError, bad_value, unsupported
from services.ingress.api.models import ModelRegistry
from services.ingress.api.responses_api.events import ResponseStream, last_response, unstored
from services.ingress.api.responses_api.parsing import input_items, parse_responses, with_earlier
from services.ingress.api.responses_api.requests import ResponsesRequest
from services.ingress.api.streams import COMMENT, ResponseHead, error_event
from services.ingress.http.keys import KeyHolder
from services.ingress.http.open_calls import OpenCalls
from services.ingress.http.response_log import BYTES_MAX, LOG, RESPONSES, ResponseLog, Values, ended_by

PATH = "/v1/responses"
#: An ingress with responses in the background says so as often, and is lost when it has not for so long, seconds.
BEAT_S, LOST_S = 1.0, 5.0
#: Time for the store to answer once, and with retries: a server that dies takes what it was asked with it, and the
#: others were seen to take 5.3 s to elect a leader.
TRY_S, STORE_S = 2.0, 8.0
#: Pause of readers at another ingress than the one that makes the response.
POLL_S = 0.1
#: Other ingresses whose signs of life are remembered.
OWNERS_MAX = 256
STORES_NONE = "This cluster stores no responses: send the whole conversation as `input`."
_OPEN = ("queued", "in_progress")
P = ParamSpec("P")
T = TypeVar("T")
_GAVE_WAY = error_event(ApiError(500, "The end of its events is not stored: ask for it without `stream`.", kind=SERVER))


class _Stored(msgspec.Struct):
    id: str
    created_at: int


class Responses:
    """The routes below ``/v1/responses``."""

    def __init__(
        self,
        *,
        calls: OpenCalls,
        models: ModelRegistry,
        owner: str,
        now_s: Callable[[], float],
        stored: bool = True,
        lost_s: float = LOST_S,
    ) -> None:
        """``owner``: this ingress, in this incarnation; ``stored``: False where the cluster keeps no responses."""
        #: Set once there is a store.
        self.values: Values | None = None
        self._calls = calls
        self._models = models
        self._owner = owner
        self._now_s = now_s
        self._none = _no_store() if stored else ApiError(400, STORES_NONE, code="no_store")
        self._lost_s = lost_s
        self._logs: dict[str, ResponseLog] = {}
        #: Responses that this ingress is taking over.
        self._taking: set[str] = set()
        self._beats: dict[str, tuple[int, float]] = {}
        self._beating = False

    # Requests

    def create(self, exchange: Exchange, holder: KeyHolder) -> None:
        """POST /v1/responses.

        Raises:
            ApiError: what the client has to change.
        """
        request = decode_body(exchange.request.body, ResponsesRequest)
        if request.background and request.store is False:
            raise bad_value("background", "background can only be used when `store` is true")
        if self.values is None:
            if request.background or request.previous_response_id is not None:
                raise self._none
            request = replace(request, store=False)
        if request.previous_response_id is None and not request.background:
            self._begin(exchange, request, holder)
        else:
            self._serve(exchange, self._begin_stored(exchange, request, holder))

    def show(self, exchange: Exchange, holder: KeyHolder) -> None:
        """GET /v1/responses/{id}, as a stream from an event on where asked for."""
        query = {name: values[-1] for name, values in parse_qs(exchange.request.query.decode("latin-1")).items()}
        after = query.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal():
            raise bad_value("starting_after", "`starting_after` is the number of an event.")
        identity = exchange.request.path.rpartition("/")[2]
        self._serve(exchange, self._show(exchange, identity, holder, query.get("stream") == "true", int(after)))

    def delete(self, exchange: Exchange, holder: KeyHolder) -> None:
        """DELETE /v1/responses/{id}."""
        self._serve(exchange, self._delete(exchange, exchange.request.path.rpartition("/")[2], holder))

    def cancel(self, exchange: Exchange, holder: KeyHolder) -> None:
        """POST /v1/responses/{id}/cancel."""
        self._serve(exchange, self._cancel(exchange, exchange.request.path.split("/")[3], holder))

    def _serve(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        async def served() -> None:
            try:
                await work
            except StoreAway:
                raise _no_store() from None

        self._calls.spawn(PATH, served(), exchange)

    # Responses with a client

    def _begin(self, exchange: Exchange, request: ResponsesRequest, holder: KeyHolder) -> None:
        keep = hand_on if request.store is False else self._keeper(request, holder)
        parsed = parse_responses(request, self._models, keep=keep)
        self._calls.submit(exchange, PATH, parsed, holder)

    async def _begin_stored(self, exchange: Exchange, request: ResponsesRequest, holder: KeyHolder) -> None:
        earlier = request.previous_response_id
        if earlier is not None:
            found, _ = await self._stored(earlier, holder)
            if found.status in _OPEN:
                raise bad_value("previous_response_id", f"Response {earlier} is not complete.")
            request = with_earlier(request, found)
        if request.background:
            await self._begin_in_background(exchange, request, holder)
        else:
            self._begin(exchange, request, holder)

    def _keeper(self, request: ResponsesRequest, holder: KeyHolder) -> Keep:
        async def keep(last: bytes, tell: Callable[[bytes], None]) -> None:
            told = last_response(last)
            assert told is not None
            status, document = told
            identity = msgspec.json.decode(document, type=_Stored).id
            body = StoredResponse(
                holder=holder.name, status=status, document=document, input=msgspec.json.encode(input_items(request))
            )
            kept = len(body.document) + len(body.input) <= BYTES_MAX
            try:
                if kept:
                    assert self.values is not None
                    await _answered(self.values.put, RESPONSES, identity, body)
            except StoreAway:
                kept = False
            tell(last if kept else unstored(last))

        return lambda last, tell: self._calls.spawn(PATH, keep(last, tell))

    # Stored responses

    async def _stored(self, identity: str, holder: KeyHolder) -> tuple[StoredResponse, int]:
        found, revision = await _answered(self._values().get, RESPONSES, identity) if _is_id(identity) else (None, 0)
        if not isinstance(found, StoredResponse) or found.holder != holder.name:
            raise ApiError(404, f"Response with id {identity[:100]} not found.", code="response_not_found")
        return found, revision

    def _values(self) -> Values:
        if self.values is None:
            raise self._none
        return self.values

    async def _show(self, exchange: Exchange, identity: str, holder: KeyHolder, stream: bool, after: int) -> None:
        found, _ = await self._stored(identity, holder)
        if found.status in _OPEN:
            await self._take_if_lost(identity, found, holder)
        if not stream:
            exchange.respond(200, found.document)
        elif not found.owner:
            raise bad_value("stream", "Only a response made in the background can be streamed again.")
        else:
            await self._replay(exchange, identity, holder, after)

    async def _delete(self, exchange: Exchange, identity: str, holder: KeyHolder) -> None:
        found, _ = await self._stored(identity, holder)
        values = self._values()
        await values.delete(RESPONSES, identity)
        if identity in self._logs:
            self._logs[identity].leave()
        chunk = 0
        while found.owner and (await values.get(LOG, f"{identity}.{chunk}"))[0] is not None:
            await values.delete(LOG, f"{identity}.{chunk}")
            chunk += 1
        body = {"id": identity, "object": "response", "deleted": True}
        exchange.respond(200, msgspec.json.encode(body))

    async def _cancel(self, exchange: Exchange, identity: str, holder: KeyHolder) -> None:
        values = self._values()
        while True:
            found, revision = await self._stored(identity, holder)
            if not found.owner:
                raise bad_value("response_id", "Cannot cancel a synchronous response.")
            if found.status not in _OPEN:  # as OpenAI has it: what has ended stays as it is
                exchange.respond(200, found.document)
                return
            document = msgspec.json.decode(found.document) | {"status": "cancelled"}
            body = replace(found, status="cancelled", document=msgspec.json.encode(document), request=b"")
            try:
                await values.put(RESPONSES, identity, body, revision)
                break
            except KeyConflict:
                continue  # it went on, or ended
        if identity in self._logs:
            self._logs[identity].leave()
        exchange.respond(200, body.document)

    # In the background

    async def _begin_in_background(self, exchange: Exchange, request: ResponsesRequest, holder: KeyHolder) -> None:
        identity = f"resp_{self._calls.next_id()}"
        log, start = self._open(exchange.request, identity, request, holder)
        if len(log.head.input) + len(log.head.request) + len(log.head.document) > BYTES_MAX:
            raise bad_value("background", "The input is larger than can be stored.")
        revision = await _answered(self._values().put, RESPONSES, identity, log.head)
        start(revision)
        if request.stream:
            await self._replay(exchange, identity, holder, -1)
        else:
            exchange.respond(200, log.head.document)

    def _open(
        self,
        sent: HttpRequest,
        identity: str,
        request: ResponsesRequest,
        holder: KeyHolder,
        *,
        chunks: list[ResponseEvents] | None = None,
        created: int = 0,
    ) -> tuple[ResponseLog, Callable[[int], None]]:
        """The log of a response, and what starts its call.

        Args:
            chunks: Of its log, where another ingress began it.
            created: When that was, Unix seconds.
        """
        chunks = chunks or []
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        count = sum(chunk.events.count(b"\n\n") for chunk in chunks)
        parsed = parse_responses(request, self._models, begun=tokens)
        if parsed.members:
            raise unsupported("background", "`background` is not supported for a cascade: use `stream`.")
        form = parsed.form
        assert form is not None
        own = ResponseHead(identity, created or int(self._now_s()), parsed.model.shown, 1)  # its id is given out here

        def writer(replayed: int) -> ResponseStream:
            assert form.stream is not None
            stream = form.stream(own)
            assert isinstance(stream, ResponseStream)
            stream.resume(count, replayed)
            return stream

        stream = writer(0)
        head = StoredResponse(
            holder=holder.name,
            status="in_progress" if chunks else "queued",
            document=stream.document("in_progress" if chunks else "queued"),
            input=msgspec.json.encode(input_items(request)),
            request=msgspec.json.encode(request),
            owner=self._owner,
        )
        log = ResponseLog(self._values(), identity, head, stream, chunks=len(chunks))

        def logged(_: ResponseHead) -> ResponseStream:
            log.stream = writer(len(tokens))
            return log.stream

        def start(revision: int) -> None:
            self._logs[identity] = log
            self._calls.spawn(PATH, self._run(identity, log, revision))
            if not self._beating:
                self._calls.spawn(PATH, self._beat())
            background = log.exchange(sent)
            try:
                self._calls.submit(background, PATH, replace(parsed, form=replace(form, stream=logged)), holder)
            except ApiError as error:
                self._calls.answer_error(background, PATH, error)

        return log, start

    async def _run(self, identity: str, log: ResponseLog, revision: int) -> None:
        try:
            await log.run(revision)
        finally:
            del self._logs[identity]

    async def _beat(self) -> None:
        """Say that this ingress lives, as long as it makes responses in the background."""
        self._beating = True
        while self._logs:
            with contextlib.suppress(StoreAway):
                await self._values().put(LOG, self._owner, ResponseEvents())
            await asyncio.sleep(BEAT_S)
        self._beating = False

    async def _replay(self, exchange: Exchange, identity: str, holder: KeyHolder, after: int) -> None:
        """Send the events behind number ``after``, those in the store and those that come."""
        exchange.start_stream([(b"x-request-id", identity.removeprefix("resp_").encode())], COMMENT)
        chunk, over, whole = 0, "", False
        while not exchange.closed:
            try:
                found, _ = await self._values().get(LOG, f"{identity}.{chunk}")
                if isinstance(found, ResponseEvents) and (over or not found.last):  # its end is seen when it is stored
                    chunk, whole = chunk + 1, found.last
                    exchange.write(_behind(found, after))
                elif over:
                    break
                else:
                    over = await self._goes_on(identity, holder)
            except StoreAway:
                await asyncio.sleep(BEAT_S)
            except ApiError:
                over = "gone"
        exchange.end(b"" if whole or over == "cancelled" else _GAVE_WAY)

    async def _goes_on(self, identity: str, holder: KeyHolder) -> str:
        """Wait for more of a response; its status where its log may only be read to its end."""
        log = self._logs.get(identity)
        if log is not None:
            await log.grown()
            return ""
        found, _ = await self._stored(identity, holder)
        if found.status not in _OPEN:
            return found.status
        await self._take_if_lost(identity, found, holder)
        await asyncio.sleep(POLL_S)
        return ""

    async def _take_if_lost(self, identity: str, found: StoredResponse, holder: KeyHolder) -> None:
        """Go on with a response whose ingress gives no sign of life, whether its readers stay or not."""
        if found.owner == self._owner or not await self._lost(found.owner) or identity in self._taking:
            return
        self._taking.add(identity)
        self._calls.spawn(PATH, self._take(identity, found.owner, holder))

    async def _take(self, identity: str, owner: str, holder: KeyHolder) -> None:
        """Take a response over from its lost owner, as often as the store goes away meanwhile."""
        try:
            while True:
                with contextlib.suppress(StoreAway):
                    found, revision = await self._stored(identity, holder)
                    if found.status in _OPEN and found.owner in (owner, self._owner) and identity not in self._logs:
                        await self._go_on(identity, found, revision, holder)
                    return
                await asyncio.sleep(BEAT_S)
        finally:
            self._taking.discard(identity)

    async def _go_on(self, identity: str, found: StoredResponse, revision: int, holder: KeyHolder) -> None:
        values = self._values()
        body = replace(found, owner=self._owner)
        try:
            revision = await values.put(RESPONSES, identity, body, revision)
        except KeyConflict:
            return  # another one did
        chunks = list[ResponseEvents]()
        while isinstance((chunk := (await values.get(LOG, f"{identity}.{len(chunks)}"))[0]), ResponseEvents):
            chunks.append(chunk)
        if chunks and chunks[-1].last:
            status, document = ended_by(chunks[-1])
        else:
            created = msgspec.json.decode(found.document, type=_Stored).created_at
            sent = HttpRequest(method="POST", path=PATH, headers={}, body=b"", keep_alive=False, chunked=False)
            try:
                request = decode_body(found.request, ResponsesRequest)
                _, start = self._open(sent, identity, request, holder, chunks=chunks, created=created)
                start(revision)
                return
            except ApiError as error:  # such as for a model that is served no more
                told = {"status": "failed", "error": {"code": "server_error", "message": error.message}}
                status, document = "failed", msgspec.json.encode(msgspec.json.decode(found.document) | told)
        ended = replace(body, status=status, document=document, request=b"")
        with contextlib.suppress(KeyConflict):  # it was cancelled meanwhile
            await values.put(RESPONSES, identity, ended, revision)

    async def _lost(self, owner: str) -> bool:
        _, revision = await self._values().get(LOG, owner)
        now_s = asyncio.get_running_loop().time()
        seen, since = self._beats.get(owner, (-1, now_s))
        if revision != seen:
            since = now_s
        self._beats[owner] = (revision, since)
        if len(self._beats) > OWNERS_MAX:
            del self._beats[next(iter(self._beats))]
        return now_s - since > self._lost_s


async def _answered(ask: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Answer of the store, asked again where it gives none.

    Raises:
        StoreAway: it does not for STORE_S.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STORE_S):
            while True:
                with contextlib.suppress(StoreAway, TimeoutError):
                    return await asyncio.wait_for(ask(*args, **kwargs), TRY_S)
                await asyncio.sleep(POLL_S)
    raise StoreAway


def _behind(chunk: ResponseEvents, after: int) -> bytes:
    """Events of a chunk behind the one of that number."""
    events = chunk.events.split(b"\n\n")
    return b"\n\n".join(events[max(0, after + 1 - chunk.first) :])


def _is_id(identity: str) -> bool:
    return identity.startswith("resp_") and identity.isascii() and identity.replace("-", "").replace("_", "").isalnum()


def _no_store() -> ApiError:
    return ApiError(503, "The store of responses does not answer.", kind=SERVER, code="no_store")
