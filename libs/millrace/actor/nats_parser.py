"""Parser of NATS's client protocol that hands messages of runtime subscriptions over by plain calls.

nats-py matches up to two regular expressions per message and awaits a coroutine for each. Here a message is found by
its line end and split at blanks; control lines (PING, INFO, errors), which come every few seconds, go to nats-py's
parser.

Source: docs.nats.io, "Client Protocol", MSG and HMSG.
"""

from __future__ import annotations

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
        super().__init__(client)

    def reset(self) -> None:
        """Forget what was received: the connection is a new one."""
        super().reset()
        self._wanted = 0  # bytes without which the message in the buffer is incomplete

    async def parse(self, data: bytes = b"") -> None:
        """Handle all complete messages, in order; keep the rest.

        Raises:
            ProtocolError: this is not NATS's protocol.
        """
        buffer = self.buf
        if buffer:
            buffer += data
            if len(buffer) < self._wanted:
                return
            data = bytes(buffer)
            buffer.clear()
        position, end = 0, len(data)
        self._wanted = 0
        while position < end:
            line_end = data.find(_LINE_END, position, position + _LINE_BYTES_MAX)
            if line_end < 0:
                if end - position > _LINE_BYTES_MAX:
                    raise ProtocolError("nats: unknown protocol")
                break
            begin = line_end + 2
            if data[position] not in _FIRST:
                await super().parse(data[position:begin])
                position = begin
            else:
                words = data[position:line_end].split()
                stop = begin + _size(words)
                if stop + 2 > end:
                    self._wanted = stop + 2 - position
                    break
                taken = self._hand_over(words, data, begin, stop)
                if taken is not None:
                    await taken
                position = stop + 2
            if self.buf is not buffer:
                return  # the connection was replaced meanwhile
        buffer += data[position:]

    def _hand_over(self, words: list[bytes], data: bytes, begin: int, stop: int) -> Any:
        """Call the message's taker; or return nats-py's coroutine, where it is one of its own."""
        try:
            headed = words[0] == _HMSG
            subject, number = words[1], int(words[2])
            reply = words[3] if len(words) == (6 if headed else 5) else b""
            body = begin + int(words[-2]) if headed else begin
        except (ValueError, IndexError):
            raise ProtocolError("nats: malformed MSG") from None
        taker = self._takers.get(number)
        if taker is None:
            headers = data[begin:body] if headed else None
            return self.nc._process_msg(number, subject, reply, data[body:stop], headers)
        taker(subject.decode(), reply.decode(), data[body:stop], data[begin:body])
        return None


def _size(words: list[bytes]) -> int:
    """Bytes of a message, headers included."""
    try:
        if words[0] not in (_MSG, _HMSG):
            raise ProtocolError("nats: unknown protocol")
        return int(words[-1])
    except ValueError:
        raise ProtocolError("nats: malformed MSG") from None
