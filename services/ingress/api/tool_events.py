"""Events of a streamed chat completion with tools.

Text comes as it is; a call's name comes when it is known, and its arguments as they are written.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.api.responses import call_id, calls_reason
from services.ingress.api.streams import ResponseHead, StreamParts, finish_choice
from services.ingress.api.tool_call_parser import CallBegun, Piece, TextPiece, ToolCallParser
from services.ingress.api.tools import ToolPlan
from services.ingress.calls.messages import CascadeReport, ChoiceDelta, Usage

_encode = msgspec.json.Encoder().encode


class ToolChatStream:
    """An EventStream of a chat completion whose output may be calls."""

    __slots__ = ("_parts", "_plan", "_readers", "_response")

    def __init__(self, head: ResponseHead, plan: ToolPlan, *, include_usage: bool, continuous: bool) -> None:
        self._parts = StreamParts(head, "chat.completion.chunk", include_usage=include_usage, continuous=continuous)
        self._plan = plan
        self._response = head.id
        self._readers = [ToolCallParser(plan) for _ in range(head.choices)]

    def opening(self) -> bytes:
        return self._parts.roles()

    def deltas(self, deltas: list[ChoiceDelta], usage: Usage) -> bytes:
        tail = self._parts.tail(usage)
        return b"".join([self._events(delta, tail) for delta in deltas])

    def closing(self, usage: Usage) -> bytes:
        return self._parts.closing(usage)

    def tell(self, report: CascadeReport) -> None:
        self._parts.tell(report)

    def _events(self, delta: ChoiceDelta, tail: bytes) -> bytes:
        reader = self._readers[delta.index]
        pieces = reader.push(delta.text)
        if delta.finish_reason:
            pieces += reader.close()
        out = b"".join(self._event(delta.index, self._content(delta.index, piece), tail) for piece in pieces)
        return out + self._finish(delta, reader.calls > 0, tail)

    def _content(self, choice: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, TextPiece):
            return {"content": piece.text}
        if not isinstance(piece, CallBegun):
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
        call = {"id": call_id(self._response, choice, piece.index), "type": "function"}
        return {"tool_calls": [{"index": piece.index, **call, "function": {"name": piece.name, "arguments": ""}}]}

    def _event(self, choice: int, delta: dict[str, Any], tail: bytes) -> bytes:
        own = b'{"index":%d,"delta":' % choice + _encode(delta) + b',"logprobs":null,"finish_reason":null}]'
        return self._parts.head + own + tail

    def _finish(self, delta: ChoiceDelta, called: bool, tail: bytes) -> bytes:
        if not delta.finish_reason:
            return b""
        if called:
            delta = msgspec.structs.replace(delta, finish_reason=calls_reason(self._plan.mode, delta.finish_reason))
        return self._parts.head + finish_choice(delta, b'"delta":{},"logprobs":null') + tail
