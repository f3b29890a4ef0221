"""A message of the model: events of its stream as the output comes, and the message itself.

A stream is ``message_start``, ``ping``, then for each block ``content_block_start``, its deltas and
``content_block_stop``, then ``message_delta`` with the stop reason and the usage, and ``message_stop``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.api.cascade_reports import cascade_object
from services.ingress.api.dialects import anthropic_error
from services.ingress.api.errors import ApiError
from services.ingress.api.streams import ResponseHead, WrittenStream
from services.ingress.api.translated_requests import whole_arguments
from services.ingress.calls.messages import CallPart, ChoiceDelta, Usage

_encode = msgspec.json.Encoder().encode


class MessageStream(WrittenStream):
    """Events of one message.

    Attributes:
        content: Blocks that have ended.
    """

    __slots__ = ("_blank", "_block", "_cut", "_stop", "_stopped_by", "_text", "content")

    def __init__(self, head: ResponseHead) -> None:
        super().__init__(head)
        self._block: dict[str, Any] | None = None
        self._text: list[str] = []
        self._blank = ""
        self._cut = False
        self._stop = ""
        self._stopped_by: str | int | None = None
        self.content: list[dict[str, Any]] = []

    def opening(self) -> bytes:
        message = self._message([], Usage(self._head.prompt_tokens, 0))
        return _event("message_start", message=message) + _event("ping")

    def deltas(self, deltas: list[ChoiceDelta], usage: Usage) -> bytes:
        out = b""
        for delta in deltas:
            if delta.reasoning:
                out += self._begin({"type": "thinking", "thinking": "", "signature": ""})
                out += self._delta("thinking_delta", "thinking", delta.reasoning)
            if delta.text:
                out += self._say(delta.text)
            for part in delta.calls:
                out += self._call(part)
            if delta.finish_reason:
                self._stop, self._stopped_by = delta.finish_reason, delta.stop_reason
        return out

    def closing(self, usage: Usage) -> bytes:
        out = self._end()
        more = {} if self._report is None else {"cascade": cascade_object(self._report)}
        out += _event("message_delta", delta=self._stopped(), usage=_usage(usage), **more)
        return out + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"

    def body(self, usage: Usage) -> bytes:
        """The whole message, after its end."""
        message = self._message(self.content, usage) | self._stopped()
        return _encode(message if self._report is None else message | {"cascade": cascade_object(self._report)})

    def _end(self) -> bytes:
        """Events of the last block's end. A message has one block at least, as clients expect."""
        out = b""
        if self._block is None and not self.content:
            blank = self._blank
            out = self._begin({"type": "text", "text": ""})
            if blank:
                out += self._delta("text_delta", "text", blank)
        return out + self._end_block()

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _stopped(self) -> dict[str, Any]:
        """Reason of the end, as vLLM has it: a call that a stop string cut short is none."""
        called = any(block["type"] == "tool_use" for block in self.content)
        if self._stop == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(self._stopped_by, str) and (self._cut or not called):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stopped_by}
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    # Blocks.

    def _say(self, text: str) -> bytes:
        if self._block is None or self._block["type"] != "text":
            self._blank += text
            if not self._blank.strip():
                return b""  # between two blocks it is no text
            text, self._blank = self._blank, ""
        return self._begin({"type": "text", "text": ""}) + self._delta("text_delta", "text", text)

    def _call(self, part: CallPart) -> bytes:
        out = b""
        if part.name:
            name = part.id or f"toolu_{self._head.id.partition('_')[2]}_{part.index}"
            out = self._end_block() + self._begin({"type": "tool_use", "id": name, "name": part.name, "input": {}})
        if part.arguments:
            out += self._delta("input_json_delta", "partial_json", part.arguments)
        return out

    def _begin(self, block: dict[str, Any]) -> bytes:
        if self._block is not None and self._block["type"] == block["type"]:
            return b""
        out = self._end_block()
        self._block, self._blank = block, ""
        return out + _event("content_block_start", index=len(self.content), content_block=block)

    def _end_block(self) -> bytes:
        block, self._block = self._block, None
        if block is None:
            return b""
        text, self._text = "".join(self._text), []
        index, out = len(self.content), b""
        if block["type"] == "thinking":
            signature = f"{self._head.id}_{index}"
            delta = {"type": "signature_delta", "signature": signature}
            out = _event("content_block_delta", index=index, delta=delta)
            block = block | {"thinking": text, "signature": signature}
        elif block["type"] == "text":
            block = block | {"text": text}
        else:
            arguments = whole_arguments(text)
            self._cut = bool(text) and arguments != text
            block = block | {"input": msgspec.Raw(arguments.encode())}
        self.content.append(block)
        return out + _event("content_block_stop", index=index)

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        self._text.append(text)
        fields = (len(self.content), kind.encode(), field.encode(), _encode(text))
        data = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}' % fields
        return b"event: content_block_delta\ndata: " + data + b"\n\n"


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))


def _usage(usage: Usage) -> dict[str, Any]:
    """Counts as Anthropic has them: what was cached is not among the input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
