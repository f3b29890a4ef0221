"""A server that answers OpenAI's chat requests at once, with fixed words: what remains is HTTP and the generator."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httptools
from millrace.actor.loop import run_to_end

_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class MockConnection(asyncio.Protocol):
    """One connection: requests in, answers out."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a server's are always both ways
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        """Answer a whole request."""
        asked: dict[str, Any] = json.loads(self._body) if self._body else {}
        self._body = b""
        self.transport.write(answer(asked))


def answer(asked: dict[str, Any]) -> bytes:
    """The whole response to a body; a list of models to none."""
    tokens = int(asked.get("max_tokens", 1))
    usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    if not asked:
        body: dict[str, Any] = {"object": "list", "data": [{"id": "m", "object": "model"}]}
    else:
        message = {"role": "assistant", "content": "word " * tokens}
        body = {
            "object": "chat.completion",
            "model": "m",
            "choices": [{"index": 0, "message": message}],
            "usage": usage,
        }
    if not asked.get("stream"):
        content = json.dumps(body).encode()
        return _JSON % (len(content), content)
    delta = {"object": "chat.completion.chunk", "model": "m", "choices": [{"index": 0, "delta": {"content": "word "}}]}
    last = {**delta, "choices": [], "usage": usage}
    events = [_event(json.dumps(delta, separators=(",", ":")))] * tokens
    return b"".join([_STREAM, *events, _event(json.dumps(last, separators=(",", ":"))), _event("[DONE]"), b"0\r\n\r\n"])


def _event(text: str) -> bytes:
    content = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(content), content)


async def serve(port: int) -> None:
    """Serves until it is ended."""
    server = await asyncio.get_running_loop().create_server(MockConnection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    run_to_end(serve(int(sys.argv[1])))
