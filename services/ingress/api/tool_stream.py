"""Events of a streamed chat completion with tools.

With one named function its arguments are streamed as they come. A list of calls, and calls between tags, are sent
whole when the output has ended: until then nobody knows whether they parse. Text before a tag is streamed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.api.responses import call_id, calls_reason
from services.ingress.api.streams import ResponseHead, StreamParts, finish_choice
from services.ingress.api.tools import OPEN_TAG, ParsedCall, ToolMode, ToolPlan, parse_calls
from services.ingress.calls.messages import CascadeReport, ChoiceDelta, Usage

_encode = msgspec.json.Encoder().encode


class ToolChatStream:
    """An EventStream of a chat completion whose output may be calls."""

    __slots__ = ("_held", "_named_open", "_parts", "_plan", "_response")

    def __init__(self, head: ResponseHead, plan: ToolPlan, *, include_usage: bool, continuous: bool) -> None:
        self._parts = StreamParts(head, "chat.completion.chunk", include_usage=include_usage, continuous=continuous)
        self._plan = plan
        self._response = head.id
        self._held = [""] * head.choices
        self._named_open = [False] * head.choices

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
        index = delta.index
        out = b""
        if self._plan.mode is ToolMode.NAMED:
            if delta.text:
                out = self._event(index, {"tool_calls": [self._argument_piece(index, delta.text)]}, tail)
            return out + self._finish(delta, self._named_open[index], tail)
        self._held[index] += delta.text
        if self._plan.mode is ToolMode.TAGGED:
            shown = self._text_before_tag(index)
            if shown:
                out = self._event(index, {"content": shown}, tail)
        if not delta.finish_reason:
            return out
        text, calls = parse_calls(self._plan, self._held[index])
        if text:
            out += self._event(index, {"content": text}, tail)
        if calls:
            whole = [self._call(index, i, call) for i, call in enumerate(calls)]
            out += self._event(index, {"tool_calls": whole}, tail)
        return out + self._finish(delta, bool(calls), tail)

    def _text_before_tag(self, choice: int) -> str:
        """Take what is text for sure off what is held: all before a tag, or before what may become one."""
        held = self._held[choice]
        at = held.find(OPEN_TAG)
        if at < 0:
            at = next(
                (len(held) - n for n in range(len(OPEN_TAG) - 1, 0, -1) if held.endswith(OPEN_TAG[:n])), len(held)
            )
        self._held[choice] = held[at:]
        return held[:at]

    def _argument_piece(self, choice: int, text: str) -> dict[str, Any]:
        if self._named_open[choice]:
            return {"index": 0, "function": {"arguments": text}}
        self._named_open[choice] = True
        return self._call(choice, 0, ParsedCall(self._plan.function, text))

    def _call(self, choice: int, index: int, call: ParsedCall) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": call_id(self._response, choice, index), "type": "function", "function": function}

    def _event(self, choice: int, delta: dict[str, Any], tail: bytes) -> bytes:
        own = b'{"index":%d,"delta":' % choice + _encode(delta) + b',"logprobs":null,"finish_reason":null}]'
        return self._parts.head + own + tail

    def _finish(self, delta: ChoiceDelta, called: bool, tail: bytes) -> bytes:
        if not delta.finish_reason:
            return b""
        if called:
            delta = msgspec.structs.replace(delta, finish_reason=calls_reason(self._plan.mode, delta.finish_reason))
        return self._parts.head + finish_choice(delta, b'"delta":{},"logprobs":null') + tail
