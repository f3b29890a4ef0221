"""The parser of what a NATS server sends: whole and torn messages, control lines between them, and refusals."""

import asyncio
from random import Random
from typing import Any

import pytest
from millrace.actor.nats_parser import DirectParser
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

HEAD = b"NATS/1.0\r\nMr-Type: A/1\r\n\r\n"


class Client:
    is_connected = True

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def taker(self, number: int) -> Any:
        def take(subject: str, reply: str, payload: bytes, headers: bytes) -> None:
            self.heard.append((number, subject, reply, payload, headers))

        return take

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.heard.append((sid, subject.decode(), reply.decode(), data, headers or b""))

    async def _process_ping(self) -> None:
        await asyncio.sleep(0)
        self.heard.append(("ping",))

    async def _process_pong(self) -> None:
        self.heard.append(("pong",))

    async def _process_err(self, text: str) -> None:
        self.heard.append(("err", text))

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.heard.append(("info", info))


def message(number: int, payload: bytes, *, reply: str = "", headers: bytes = b"") -> bytes:
    to = f" {reply}" if reply else ""
    sizes = f"{len(headers)} {len(headers) + len(payload)}" if headers else f"{len(payload)}"
    word = "HMSG" if headers else "MSG"
    return f"{word} mr.a.b {number}{to} {sizes}\r\n".encode() + headers + payload + b"\r\n"


def spoken() -> bytes:
    """Some of everything, with payloads that look like lines of the protocol."""
    return b"".join(
        (
            b'INFO {"max_payload": 100}\r\n',
            message(1, b"hello", headers=HEAD),
            b"PING\r\n",
            message(2, b"", reply="_INBOX.x.1"),
            message(9, b"own", headers=HEAD, reply="_INBOX.y"),
            message(1, b"MSG mr.a.b 1 5\r\nPING\r\n", headers=HEAD, reply="_INBOX.x.2"),
            b"PONG\r\n+OK\r\n",
            b"-ERR 'Permissions Violation'\r\n",
            message(2, b"x" * 5_000),
            message(9, b"\r\n"),
        )
    )


async def heard(pieces: list[bytes], takers: tuple[int, ...], rng: Random) -> list[tuple[Any, ...]]:
    """Calls that a client with takers of these subscriptions gets, whose loop reads some pieces late."""
    client, reader = Client(), asyncio.StreamReader()
    parser = DirectParser(client, {number: client.taker(number) for number in takers})

    async def read() -> None:
        while data := await reader.read(40):
            await parser.parse(data)

    parser.read_from(reader)
    reading = asyncio.create_task(read())
    for piece in pieces:
        reader.feed_data(piece)
        for _ in range(rng.choice((0, 0, 1, 4))):
            await asyncio.sleep(0)
    reader.feed_eof()
    await reading
    assert not parser.buf
    return client.heard


@pytest.mark.parametrize("seed", range(20))
async def test_says_what_nats_py_says_torn_anywhere_or_whole(seed: int) -> None:
    rng, data = Random(seed), spoken()
    cuts = sorted(rng.sample(range(1, len(data)), rng.choice((0, 1, 3, 40, len(data) - 1))))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    client = Client()
    await Parser(client).parse(data)
    assert len(client.heard) == 10
    assert await heard(pieces, (1, 2), rng) == client.heard


@pytest.mark.parametrize("connected", [True, False])
async def test_a_message_is_taken_as_it_comes_where_the_connection_stands(connected: bool) -> None:
    client, reader = Client(), asyncio.StreamReader()
    client.is_connected = connected
    DirectParser(client, {1: client.taker(1)}).read_from(reader)
    reader.feed_data(message(1, b"now", headers=HEAD))
    assert [each[3] for each in client.heard] == [b"now"] * connected


@pytest.mark.parametrize(
    "data", [b"HELLO there\r\n", b"MSG a b 3\r\nabc\r\n", b"MSG a 1 x\r\n", b"MSG 3\r\nabc\r\n", b"M" * 70_000]
)
async def test_refuses_what_is_no_protocol(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        await heard([data], (1,), Random(0))


async def test_a_new_connection_begins_anew() -> None:
    client = Client()
    parser = DirectParser(client, {1: client.taker(1)})
    await parser.parse(message(1, b"torn", headers=HEAD)[:-3])
    parser.reset()
    await parser.parse(message(1, b"whole", headers=HEAD))
    assert [each[3] for each in client.heard] == [b"whole"]


async def test_a_connection_replaced_in_the_middle_is_left() -> None:
    client = Client()
    parser = DirectParser(client, {1: client.taker(1)})

    async def lose(text: str) -> None:
        client.heard.append(("err", text))
        parser.reset()

    client._process_err = lose  # type: ignore[method-assign]
    await parser.parse(b"-ERR 'stale'\r\n" + message(1, b"of the old connection"))
    assert (client.heard, bytes(parser.buf)) == ([("err", "'stale'")], b"")
