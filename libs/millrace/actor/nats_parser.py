"""Parser of NATS's client protocol that hands messages of runtime subscriptions over by plain calls.

nats-py has a task that waits for bytes, matches up to two regular expressions per message and awaits a coroutine for
each. Here a message is taken as the socket gives it, found by its line end and split at blanks; control lines (PING,
INFO, errors), which come every few seconds, go to nats-py's task and parser.

Source: docs.nats.io, "Client Protocol", MSG and HMSG.
"""

from __future__ import annotations

from asyncio import StreamReader
from collections.abc import Callable, Mapping
from typing import Any

from nats.errors import ProtocolError
from nats.protocol.parser import Parser

#: Takes (subject, reply subject, payload, raw header block); runs to completion and never raises.
Taker = Callable[[str, str, bytes, bytes], None]

_LINE_END = b"\r\n"
_MSG, _HMSG = b"MSG", b"HMSG"
#: First bytes of the two.
_FIRST = frozenset(b"MH")
#: A longer line is no control line (nats-server's own ``max_control_line`` is 4,096).
_LINE_BYTES_MAX = 65_536


class DirectParser(Parser):
    """Parses what one connection receives."""

    def __init__(self, client: Any, takers: Mapping[int, Taker]) -> None:
        """``takers``: by subscription number; messages of other subscriptions go to the client's ``_process_msg``."""
        self._takers = takers
        self._wanted = 0
        self._awaiting: bytearray | None = None  # the buffer of a ``parse`` under way
        super().__init__(client)

    def reset(self) -> None:
        """Forget what was received: the connection is a new one."""
        super().reset()
        self._wanted = 0  # bytes without which the message in the buffer is incomplete

    def read_from(self, reader: StreamReader) -> None:
        """Take messages as they come, where nothing waits before them: no task of the client wakes for those."""
        feed = reader.feed_data

        def feed_data(data: Any) -> None:
            waits = self._awaiting is self.buf or reader._buffer  # type: ignore[attr-defined]
            feed(data if waits or not self.nc.is_connected else self._take(data))

        reader.feed_data = feed_data  # type: ignore[method-assign]

    async def parse(self, data: bytes = b"") -> None:
        """Handle all complete messages, in order; keep the rest.

        Raises:
            ProtocolError: this is not NATS's protocol.
        """
        self._awaiting = buffer = self.buf
        try:
            rest = self._take(data)
            while rest:
                stop = await self._leave_to_client(rest)
                if self.buf is not buffer:
                    return  # the connection was replaced meanwhile
                rest = self._take(rest[stop:])
        finally:
            if self._awaiting is buffer:
                self._awaiting = None

    def _take(self, data: bytes) -> bytes:
        """Hand complete messages over, and keep what is incomplete; returns the rest from what no taker gets."""
        buffer = self.buf
        if buffer:
            buffer += data
            if len(buffer) < self._wanted:
                return b""
            data = bytes(buffer)
            buffer.clear()
        position, end, takers = 0, len(data), self._takers
        self._wanted = 0
        while position < end:
            line_end = data.find(_LINE_END, position, position + _LINE_BYTES_MAX)
            if line_end < 0 and end - position <= _LINE_BYTES_MAX:
                break
            if line_end < 0 or data[position] not in _FIRST:
                return data[position:]
            try:
                number, subject, reply, body, stop = _head(data[position:line_end], line_end + 2)
            except ProtocolError:
                return data[position:]
            if stop + 2 > end:
                self._wanted = stop + 2 - position
                break
            taker = takers.get(number)
            if taker is None:
                return data[position:]
            taker(subject.decode(), reply.decode(), data[body:stop], data[line_end + 2 : body])
            position = stop + 2
        buffer += data[position:]
        return b""

    async def _leave_to_client(self, data: bytes) -> int:
        """Have the client handle a control line, or a message of its own, that is first here; returns its end."""
        begin = data.find(_LINE_END, 0, _LINE_BYTES_MAX) + 2
        if begin < 2:
            raise ProtocolError("nats: unknown protocol")
        if data[0] not in _FIRST:
            await super().parse(data[:begin])
            return begin
        number, subject, reply, body, stop = _head(data[: begin - 2], begin)
        await self.nc._process_msg(number, subject, reply, data[body:stop], data[begin:body] or None)
        return stop + 2


def _head(line: bytes, begin: int) -> tuple[int, bytes, bytes, int, int]:
    """A message's subscription, subject and reply subject, and where its payload begins and ends.

    Raises:
        ProtocolError: the line is no message's.
    """
    words = line.split()
    try:
        if (headed := words[0] == _HMSG) or words[0] == _MSG:
            reply = words[3] if len(words) == (6 if headed else 5) else b""
            return int(words[2]), words[1], reply, begin + int(words[-2]) if headed else begin, begin + int(words[-1])
    except (ValueError, IndexError):
        pass
    raise ProtocolError("nats: malformed MSG")
