"""Items of a response: events of its stream as the output comes, and the response itself.

A stream is ``response.created``, ``response.in_progress``, then for each item ``response.output_item.added``, its parts
and their deltas, ``response.output_item.done``, and last ``response.completed``, ``.incomplete`` or ``.failed``, which
carries the whole response. ``sequence_number`` counts the events from 0.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.api.cascade_reports import cascade_object
from services.ingress.api.errors import ApiError
from services.ingress.api.logprobs import chat_logprobs
from services.ingress.api.responses_api.requests import ResponsesRequest
from services.ingress.api.responses_api.translation import CUSTOM_INPUT, ENCRYPTED, ToolName, carried_reasoning
from services.ingress.api.streams import ResponseHead, WrittenStream
from services.ingress.calls.messages import CallPart, ChoiceDelta, Usage

_encode = msgspec.json.Encoder().encode


class ResponseStream(WrittenStream):
    """Events of one response. What the request fixes of the response is encoded once.

    Attributes:
        count: Events so far.
        tokens: Ids of the tokens that they cover, where deltas have them.
    """

    __slots__ = (
        "_background", "_blank", "_carries", "_fixed", "_item", "_logprobs", "_names", "_output", "_own_id",
        "_reason", "_replayed", "_resumed", "_text", "count", "tokens",
    )  # fmt: skip

    def __init__(self, head: ResponseHead, request: ResponsesRequest, names: dict[str, ToolName]) -> None:
        """``names``: of tools whose calls are shown in another way than as a function's."""
        super().__init__(head)
        self._own_id = head.id.partition("_")[2]
        self._fixed = b"," + _encode(_asked(request))[1:]
        self._names = names
        self._background = bool(request.background)
        self._carries = ENCRYPTED in (request.include or ())
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._text: list[str] = []
        self._blank = ""
        self._logprobs: list[dict[str, Any]] = []
        self.count = self._resumed = self._replayed = 0
        self.tokens: list[int] = []
        self._reason = ""

    def resume(self, count: int, tokens: int) -> None:
        """Go on after so many events, which covered the first ``tokens``: they come once more, and are not told."""
        self.count = self._resumed = count
        self._replayed = tokens

    def opening(self) -> bytes:
        if self._resumed:
            return b""
        body = self.document("in_progress")
        return self._carrying("created", body) + self._carrying("in_progress", body)

    def deltas(self, deltas: list[ChoiceDelta], usage: Usage) -> bytes:
        out = b""
        for delta in deltas:
            made = self._delta_events(delta)
            if self._replayed > 0:
                self._replayed -= delta.tokens
                self.count = self._resumed
            else:
                out += made
                self.tokens += delta.token_ids or ()
        return out

    def _delta_events(self, delta: ChoiceDelta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._reasoning(delta.reasoning)
        if delta.text or delta.logprobs:
            out += self._message(delta.text, chat_logprobs(delta.logprobs or [])["content"])
        for part in delta.calls:
            out += self._call(part)
        self._reason = delta.finish_reason or self._reason
        return out

    def closing(self, usage: Usage) -> bytes:
        status = "incomplete" if self._reason == "length" else "completed"
        out = self._begin_message([]) if self._blank and not self._output and self._item is None else b""
        out += self._end_item(status)
        return out + self._carrying(status, self.body(usage))

    def failed(self, error: ApiError) -> bytes:
        """Events that end a stream which cannot go on. One in the background has none where its ingress stops: another
        one goes on with it.
        """
        if error.code == "stopping" and self._background:
            return b""
        out = self._end_item("incomplete")
        return out + self._carrying("failed", self._whole("failed", self._output, error=error))

    def document(self, status: str, error: ApiError | None = None) -> bytes:
        """The response without any output."""
        return self._whole(status, [], error=error)

    def body(self, usage: Usage) -> bytes:
        """The whole response, after its last delta."""
        status, why = ("incomplete", "max_output_tokens") if self._reason == "length" else ("completed", None)
        return self._whole(status, self._output, usage=_usage(usage), why=why)

    def _whole(
        self,
        status: str,
        output: list[dict[str, Any]],
        *,
        usage: dict[str, Any] | None = None,
        why: str | None = None,
        error: ApiError | None = None,
    ) -> bytes:
        """The JSON document. ``why``: reason of an incomplete one; ``error``: of a failed one."""
        head = self._head
        document: dict[str, Any] = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "model": head.model,
            "output": output,
            "usage": usage,
            "incomplete_details": None if why is None else {"reason": why},
            "error": None if error is None else {"code": "server_error", "message": error.message},
        }
        if self._report is not None:
            document["cascade"] = cascade_object(self._report)
        return _encode(document)[:-1] + self._fixed

    # Parts of the output.

    def _reasoning(self, text: str) -> bytes:
        out = b""
        if self._item is None or self._item["type"] != "reasoning":
            out = self._begin({"type": "reasoning", "summary": [], "content": []}, "rs")
            part = {"type": "reasoning_text", "text": ""}
            out += self._part_event("content_part.added", content_index=0, part=part)
        self._text.append(text)
        return out + self._delta("reasoning_text", text, b',"content_index":0')

    def _message(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        if self._item is not None and self._item["type"] == "message":
            return self._text_delta(text, logprobs)
        self._blank += text
        if not self._blank.strip() and not logprobs:
            return b""  # between two items it is no message
        return self._begin_message(logprobs)

    def _begin_message(self, logprobs: list[dict[str, Any]]) -> bytes:
        """Begin a message with the text that was held."""
        text = self._blank
        out = self._begin({"type": "message", "role": "assistant", "content": []}, "msg")
        out += self._part_event("content_part.added", content_index=0, part=_text_part("", []))
        return out + self._text_delta(text, logprobs)

    def _text_delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        self._text.append(text)
        self._logprobs += logprobs
        return self._delta("output_text", text, b',"content_index":0,"logprobs":' + _encode(logprobs))

    def _call(self, part: CallPart) -> bytes:
        out = self._begin_call(part) if part.name else b""
        if not part.arguments:
            return out
        assert self._item is not None
        self._text.append(part.arguments)
        if self._item["type"] == "custom_tool_call":
            return out  # its text is told when it is whole
        return out + self._delta("function_call_arguments", part.arguments, b"")

    def _begin_call(self, part: CallPart) -> bytes:
        shown = self._names.get(part.name) or ToolName(part.name)
        own = part.id or f"call_{self._own_id}_{part.index}"
        item: dict[str, Any] = {"call_id": own, "name": shown.name}
        if shown.custom:
            return self._begin({"type": "custom_tool_call", **item, "input": ""}, "ctc")
        if shown.namespace:
            item["namespace"] = shown.namespace
        return self._begin({"type": "function_call", **item, "arguments": ""}, "fc")

    # Items.

    def _begin(self, item: dict[str, Any], prefix: str) -> bytes:
        out = self._end_item("completed")
        self._blank = ""
        self._item = {"id": f"{prefix}_{self._own_id}_{len(self._output)}", "status": "in_progress"} | item
        return out + self._event("output_item.added", output_index=len(self._output), item=self._item)

    def _end_item(self, status: str) -> bytes:
        item, self._item = self._item, None
        if item is None:
            return b""
        text, self._text = "".join(self._text), []
        self._item = item
        match item["type"]:
            case "message":
                out = self._end_message(text)
            case "reasoning":
                out = self._end_reasoning(text)
            case "function_call":
                item["arguments"] = text
                out = self._part_event("function_call_arguments.done", name=item["name"], arguments=text)
            case _:
                item["input"] = _custom_input(text)
                out = self._delta("custom_tool_call_input", item["input"], b"")
                out += self._part_event("custom_tool_call_input.done", input=item["input"])
        item["status"] = status
        out += self._event("output_item.done", output_index=len(self._output), item=item)
        self._item = None
        self._output.append(item)
        return out

    def _end_message(self, text: str) -> bytes:
        assert self._item is not None
        part = _text_part(text, self._logprobs)
        self._item["content"] = [part]
        out = self._part_event("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
        self._logprobs = []
        return out + self._part_event("content_part.done", content_index=0, part=part)

    def _end_reasoning(self, text: str) -> bytes:
        assert self._item is not None
        part = {"type": "reasoning_text", "text": text}
        self._item["content"] = [part]
        if self._carries:
            self._item["encrypted_content"] = carried_reasoning(text)
        out = self._part_event("reasoning_text.done", content_index=0, text=text)
        return out + self._part_event("content_part.done", content_index=0, part=part)

    # Events.

    def _delta(self, kind: str, text: str, more: bytes) -> bytes:
        assert self._item is not None
        name = b"response." + kind.encode() + b".delta"
        where = (name, name, self._item["id"].encode(), len(self._output), _encode(text), more, self._number())
        return (
            b'event: %b\ndata: {"type":"%b","item_id":"%b","output_index":%d,"delta":%b%b,"sequence_number":%d}\n\n'
            % where
        )

    def _part_event(self, name: str, /, **fields: Any) -> bytes:
        assert self._item is not None
        return self._event(name, item_id=self._item["id"], output_index=len(self._output), **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        data = _encode({"type": kind, "sequence_number": self._number(), **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _carrying(self, name: str, body: bytes) -> bytes:
        """An event with the whole response."""
        kind = b"response." + name.encode()
        fields = (kind, kind, self._number(), body)
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":%b}\n\n' % fields

    def _number(self) -> int:
        self.count += 1
        return self.count - 1


class _Told(msgspec.Struct):
    status: str


class _Event(msgspec.Struct):
    response: msgspec.Raw = msgspec.Raw()


def last_response(last: bytes) -> tuple[str, bytes] | None:
    """Status and JSON of the response in a body or in the last of some events; None where that has none."""
    if not last.startswith(b"{"):
        last = bytes(msgspec.json.decode(last.rstrip().rpartition(b"\ndata: ")[2], type=_Event).response)
        if not last:
            return None
    return msgspec.json.decode(last, type=_Told).status, last


def unstored(last: bytes) -> bytes:
    """A body, or some events that end with a response, which says that it was not stored."""
    before, _, after = last.rpartition(b'"store":true')
    return before + b'"store":false' + after


def _asked(request: ResponsesRequest) -> dict[str, Any]:
    """Fields of the request that a response repeats."""
    reasoning, text = request.reasoning, request.text
    form = None if text is None or text.format is None else _told(text.format)
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "background": bool(request.background),
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": "auto" if request.tool_choice is None else _told(request.tool_choice),
        "tools": [_told(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
        "store": request.store is not False,  # the last: see unstored
    }


def _told(value: Any) -> Any:
    """A part of a request without what it leaves out; a function has all its fields, as clients require them."""
    if not isinstance(value, msgspec.Struct):
        return value
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    told = {name: each for name, each in fields.items() if each is not None}
    if told.get("type") == "function" and "mode" not in fields:
        told |= {"parameters": fields["parameters"], "strict": fields["strict"]}
    return told


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _custom_input(arguments: str) -> str:
    """Text that a custom tool is called with; what is no such object stands as it is."""
    try:
        return msgspec.json.decode(arguments.encode(), type=dict[str, str])[CUSTOM_INPUT]
    except (msgspec.DecodeError, KeyError):
        return arguments


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
