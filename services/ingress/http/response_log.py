"""Events of a response that is made in the background: written to the store as they come, and read from there.

The call runs as one that streams; in place of a client's connection it has a ``BackgroundExchange``. What is not yet
in the store, nobody has seen: so another ingress can go on from there (``responses.py``).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

import msgspec
from millrace.actor.store_link import StoreAway
from millrace.actor.stored_values import KeyConflict
from millrace.contracts.message import Body
from millrace.contracts.responses import ResponseEvents, StoredResponse
from millrace.http.exchange import DisconnectReason, Exchange, HeaderPairs, HttpRequest

from services.ingress.api.errors import ApiError
from services.ingress.api.responses_api.events import ResponseStream, last_response
from services.ingress.api.streams import COMMENT

RESPONSES, LOG = "response", "response_log"
#: How often a log looks whether its response was cancelled at another ingress, and tries again to reach the store.
LOOK_S = 1.0
#: How often a response that is being made is stored again, so that it does not give way to others, seconds. One that
#: gave way twice within that time ends: those that are being made take all the room.
KEEP_S = 5.0
#: Bytes of events, or of a response, with its input: they are stored in one value.
BYTES_MAX = 900_000
_TOO_LARGE = ApiError(413, "The response is larger than can be stored.")
_GAVE_WAY = ApiError(500, "Its first events were no longer stored when another ingress went on with it.")


class Values(Protocol):
    """The store, as ``millrace.actor.stored_values.StoredValues`` has it."""

    async def get(self, bucket: str, key: str) -> tuple[Body | None, int]: ...

    async def put(self, bucket: str, key: str, value: Body, expected: int | None = None) -> int: ...

    async def delete(self, bucket: str, key: str) -> None: ...


class _Failure(msgspec.Struct):
    message: str
    code: str | None = None


class _Failed(msgspec.Struct):
    error: _Failure


class BackgroundExchange(Exchange):
    """Takes the answer of a call for its log."""

    def __init__(self, request: HttpRequest, log: ResponseLog) -> None:
        self.request = request
        self.headers = ()
        self.on_gone = None
        self.closed = self.streaming = False
        self._log = log

    def respond(
        self, status: int, body: bytes, content_type: bytes = b"application/json", headers: HeaderPairs = ()
    ) -> None:
        """A refusal: a call that is taken streams."""
        self._close()
        error = msgspec.json.decode(body, type=_Failed).error
        self._log.end(self._log.stream.failed(ApiError(status, error.message, code=error.code)))

    def start_stream(self, headers: HeaderPairs, first: bytes) -> None:
        self.streaming = True
        self.write(first)

    def write(self, events: bytes) -> None:
        if events != COMMENT:
            self._log.write(events)

    def end(self, events: bytes = b"") -> None:
        self._close()
        self._log.end(events)


class ResponseLog:
    """Writer of one response's log.

    Attributes:
        stream: Makes its events.
        chunks: Those in the store.
        head: The response in the store.
    """

    def __init__(
        self, values: Values, identity: str, head: StoredResponse, stream: ResponseStream, *, chunks: int = 0
    ) -> None:
        self.stream = stream
        self.chunks = chunks
        self._values = values
        self._id = identity
        self.head = head
        self._revision = 0
        self._events = b""
        self._first = self._count = stream.count
        self._tokens = 0
        self._kept_s = self._gone_s = 0.0
        self._ended = self._left = False
        #: The chunk that was not acknowledged, and where its events end: it may be in the store, and have been read.
        self._sent: tuple[ResponseEvents, int, int] | None = None
        self._exchange: Exchange | None = None
        self._wake = asyncio.Event()
        self._grown = asyncio.Event()

    def exchange(self, request: HttpRequest) -> Exchange:
        self._exchange = BackgroundExchange(request, self)
        return self._exchange

    def write(self, events: bytes) -> None:
        """Add events: all that the stream made, so they cover all tokens that it saw."""
        self._events += events
        self._count, self._tokens = self.stream.count, len(self.stream.tokens)
        self._wake.set()

    def end(self, events: bytes) -> None:
        """Add the last events. A call that ends because its ingress does has none: another ingress goes on with it."""
        self._ended = bool(events) and last_response(events) is not None
        self._left = not self._ended
        self.write(events)

    def leave(self) -> None:
        """Stop the call: its response was cancelled or deleted, or is made elsewhere."""
        self._left = True
        self._wake.set()
        if self._exchange is not None:
            self._exchange.gone(DisconnectReason.CLIENT_GONE)

    async def grown(self) -> None:
        """Wait until there may be more in the store, LOOK_S at most."""
        self._grown.clear()
        await _until(self._grown)

    async def run(self, revision: int) -> None:
        """Write until the end. ``revision``: of the response in the store."""
        self._revision = revision
        loop = asyncio.get_running_loop()
        looked_s = self._kept_s = loop.time()
        while not self._left:
            await _until(self._wake)
            self._wake.clear()
            try:
                if loop.time() - looked_s >= LOOK_S:
                    await self._look()
                    looked_s = loop.time()
                if self._events:
                    await self._flush()
            except KeyConflict:
                self.leave()
            except StoreAway:
                await asyncio.sleep(LOOK_S)
                self._wake.set()
            self._grown.set()

    async def _look(self) -> None:
        """Find out how the response stands, and keep it in the store.

        Raises:
            KeyConflict: it is not this log's any more.
        """
        found, self._revision = await self._values.get(RESPONSES, self._id)
        now_s = asyncio.get_running_loop().time()
        gone = (found, self._revision) == (None, 0) and now_s - self._gone_s > KEEP_S  # or the store lost all
        mine = isinstance(found, StoredResponse) and found.owner == self.head.owner and found.status != "cancelled"
        if not gone and not mine:
            raise KeyConflict(self._id)
        if gone or now_s - self._kept_s > KEEP_S:
            with suppress(KeyConflict):  # a replica answered that is behind, or others write: the next look tells
                self._revision = await self._values.put(RESPONSES, self._id, self.head, self._revision)
                self._kept_s, self._gone_s = now_s, now_s if gone else self._gone_s

    async def _flush(self) -> None:
        """Put what came, the events that end the response before it: where this ingress dies between the two, another
        one finds in them what the response is (``ended_by``).
        """
        expected = 0 if self._sent is None else None
        chunk, size, count = self._sent = self._sent or await self._next()
        try:
            await self._values.put(LOG, f"{self._id}.{self.chunks}", chunk, expected)
        except KeyConflict:  # those before gave way, so that this log was begun anew
            await self._put_head("failed", self.stream.document("failed", _GAVE_WAY))
            raise
        if chunk.last and chunk.events:
            await self._put_head(*ended_by(chunk))
        self.chunks += 1
        self._sent = None
        self._events = self._events[size:]
        del self.stream.tokens[: len(chunk.token_ids)]
        self._tokens -= len(chunk.token_ids)
        self._first = count
        if chunk.last:
            self.leave()

    async def _next(self) -> tuple[ResponseEvents, int, int]:
        """Everything that came, as a chunk; how many bytes of events it covers, and the number behind them."""
        events, last, size, count = self._events, self._ended, len(self._events), self._count
        tokens = self.stream.tokens[: self._tokens]
        if size + len(self.head.input) > BYTES_MAX:
            events, last = b"", True
            await self._put_head("failed", self.stream.document("failed", _TOO_LARGE))
        elif last:
            await self._look()  # who cancelled it shall not see its end
        elif self.head.status == "queued":
            await self._put_head("in_progress", self.stream.document("in_progress"))
        return ResponseEvents(first=self._first, events=events, token_ids=tokens, last=last), size, count

    async def _put_head(self, status: str, document: bytes) -> None:
        request = self.head.request if status == "in_progress" else b""
        head = msgspec.structs.replace(self.head, status=status, document=document, request=request)
        if head != self.head:
            self._revision = await self._values.put(RESPONSES, self._id, head, self._revision)
            self.head = head


def ended_by(chunk: ResponseEvents) -> tuple[str, bytes]:
    """Status and document of the response that a last chunk ends."""
    told = last_response(chunk.events)
    assert told is not None
    return told


async def _until(event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), LOOK_S)
