"""Server-sent events of a streamed response, from byte templates made once per stream.

One event per delta. A chat stream is: a role event per choice, content events, the last of a choice with its finish
reason, a usage event where asked for, ``[DONE]``. Text that a decoder still holds back gives no event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import msgspec

from services.ingress.api.cascade_reports import cascade_object, usage_object
from services.ingress.api.errors import ApiError
from services.ingress.api.logprobs import CompletionLogprobs, chat_logprobs, prompt_entries
from services.ingress.calls.messages import CallPart, CascadeReport, ChoiceDelta, Usage

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
#: Keeps a connection alive; clients skip it.
COMMENT = b": keep-alive\n\n"


class ResponseHead(msgspec.Struct, frozen=True):
    """Fields that every part of one response repeats.

    Attributes:
        id: ``chatcmpl-...`` or ``cmpl-...``.
        created: Unix seconds.
        choices: Number of choices over all prompts.
        prompt_tokens: Of all prompts, for ``continuous_usage_stats``.
        prompts: Token ids of each prompt, where the answer tells those of prompts and outputs.
    """

    id: str
    created: int
    model: str
    choices: int
    prompt_tokens: int = 0
    prompts: list[list[int]] | None = None

    def prompt_of(self, choice: int) -> list[int]:
        """Token ids of a choice's prompt."""
        assert self.prompts is not None
        return self.prompts[choice * len(self.prompts) // self.choices]


class EchoedPrompt(NamedTuple):
    """A prompt that stands before its output: its text, and the name of its first token."""

    text: str
    first: str


class EventStream(ABC):
    """Turns what the core delivers into bytes of the event stream."""

    __slots__ = ("_head", "_report")

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._report: CascadeReport | None = None

    def opening(self) -> bytes:
        """Events before the first delta."""
        return b""

    @abstractmethod
    def deltas(self, deltas: list[ChoiceDelta], usage: Usage) -> bytes:
        """Events of one delivery; may be empty."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """Events after the last delta, ``[DONE]`` included."""

    def tell(self, report: CascadeReport) -> None:
        """Have all further events say what the cascade did."""
        self._report = report

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Events that end a stream which cannot go on."""


class WrittenStream(EventStream):
    """One whose answer is also had whole."""

    __slots__ = ()

    @abstractmethod
    def body(self, usage: Usage) -> bytes:
        """The answer, after ``closing``."""


class StreamBody:
    """A CollectedResponse: what a stream's events tell, made at the end."""

    __slots__ = ("_deltas", "_stream")

    def __init__(self, stream: WrittenStream) -> None:
        self._stream = stream
        self._deltas: list[ChoiceDelta] = []

    def deltas(self, deltas: list[ChoiceDelta]) -> None:
        self._deltas += deltas

    def body(self, usage: Usage, report: CascadeReport | None = None) -> bytes:
        if report is not None:
            self._stream.tell(report)
        self._stream.deltas(self._deltas, usage)
        self._stream.closing(usage)
        return self._stream.body(usage)


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return b"data: " + error.body() + b"\n\n"


class _TemplateStream(EventStream):
    """Stream of events that chats and completions share.

    Attributes:
        _start: Of every event, up to the list of choices.
    """

    __slots__ = ("_continuous", "_extra", "_plain", "_start", "_wanted")

    def __init__(self, head: ResponseHead, kind: str, *, include_usage: bool, continuous: bool) -> None:
        super().__init__(head)
        fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        self._start = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._wanted = include_usage
        self._continuous = continuous
        self._extra = b""
        self._plain = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def _tail(self, usage: Usage) -> bytes:
        """Text after the choices: nothing, ``usage: null``, or the counts so far."""
        if not self._continuous:
            return self._extra + self._plain
        return self._extra + b',"usage":' + _encode(usage_object(usage)) + b"}\n\n"

    def _first_tail(self) -> bytes:
        """The same before any token."""
        return self._tail(Usage(self._head.prompt_tokens, 0))

    def closing(self, usage: Usage) -> bytes:
        if not self._wanted:
            return DONE
        usages = _encode(usage_object(usage, self._report))
        return self._start + b"]" + self._extra + b',"usage":' + usages + b"}\n\n" + DONE

    def tell(self, report: CascadeReport) -> None:
        super().tell(report)
        self._extra = b',"cascade":' + _encode(cascade_object(report))

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)


class ChatStream(_TemplateStream):
    """Events of a streamed chat completion: text, reasoning and tool calls as they come."""

    __slots__ = ("_echo", "_opened", "_starts")

    def __init__(
        self, head: ResponseHead, *, include_usage: bool, continuous: bool, echo: list[EchoedPrompt] | None = None
    ) -> None:
        super().__init__(head, "chat.completion.chunk", include_usage=include_usage, continuous=continuous)
        self._starts = [self._start + b'{"index":%d,"delta":{"content":' % i for i in range(head.choices)]
        self._opened = False
        self._echo = echo[0].text if echo else ""

    def _beginning(self) -> bytes:
        """The role, once per choice, with the prompt where ids are told; then what is echoed."""
        prompts, tail = self._head.prompts, self._first_tail()
        told = b"" if prompts is None else b',"prompt_token_ids":' + _encode(prompts[0])
        role = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        roles = b"".join([self._start + role % i + told + tail for i in range(self._head.choices)])
        if not self._echo:
            return roles
        rest = _encode(self._echo) + b'},"logprobs":null,"finish_reason":null}]' + tail
        return roles + b"".join([start + rest for start in self._starts])

    def deltas(self, deltas: list[ChoiceDelta], usage: Usage) -> bytes:
        if not self._opened:  # with the first token, as vLLM: clients take the first event for it
            self._opened = True
            return self._beginning() + self.deltas(deltas, usage)
        tail = self._tail(usage)
        if len(deltas) == 1 and deltas[0].logprobs is None and not deltas[0].finish_reason:  # nearly all
            delta = deltas[0]
            if delta.calls or delta.reasoning or self._head.prompts is not None:
                return self._events(delta, tail)
            if not delta.text:
                return b""
            return b"".join(
                (self._starts[delta.index], _encode(delta.text), b'},"logprobs":null,"finish_reason":null}]', tail)
            )
        return b"".join([self._events(delta, tail) for delta in deltas])

    def _events(self, delta: ChoiceDelta, tail: bytes) -> bytes:
        """One event, as vLLM has it: the finish reason comes with the last of the output."""
        ids, told = _ids(self._head, delta), delta.text or delta.logprobs or delta.reasoning or delta.calls
        if not (told or ids or delta.finish_reason):
            return b""
        content = self._content(delta) if told or not delta.finish_reason else {}
        logprobs = b"null" if delta.logprobs is None else _encode(chat_logprobs(delta.logprobs))
        own = b'"delta":' + _encode(content) + b',"logprobs":' + logprobs + ids
        return self._start + finish_choice(delta, own) + tail

    def _content(self, delta: ChoiceDelta) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if delta.reasoning:
            parts |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
        if delta.calls:
            parts["tool_calls"] = [self._call(delta.index, part) for part in delta.calls]
        return {"content": delta.text} | parts if delta.text or not parts else parts

    def _call(self, choice: int, part: CallPart) -> dict[str, Any]:
        function = {"name": part.name} if part.name else {}
        head = {"id": call_id(self._head.id, choice, part), "type": "function"} if part.name else {}
        return {"index": part.index, **head, "function": {**function, "arguments": part.arguments}}


class CompletionStream(_TemplateStream):
    """Events of a streamed completion."""

    __slots__ = ("_echo", "_logprobs", "_per_prompt", "_starts", "_told")

    def __init__(self, head: ResponseHead, *, include_usage: bool, continuous: bool, echo: list[EchoedPrompt]) -> None:
        """``echo``: what stands before each prompt's output; empty for none."""
        super().__init__(head, "text_completion", include_usage=include_usage, continuous=continuous)
        self._starts = [self._start + b'{"index":%d,"text":' % i for i in range(head.choices)]
        self._echo = echo
        self._told = set[int]()
        self._per_prompt = head.choices // len(echo) if echo else 1
        self._logprobs = [CompletionLogprobs() for _ in range(head.choices)]

    def opening(self) -> bytes:
        if not self._echo:
            return b""
        rest = b',"logprobs":null,"finish_reason":null}]' + self._first_tail()
        return b"".join(
            [start + _encode(self._echo[i // self._per_prompt].text) + rest for i, start in enumerate(self._starts)]
        )

    def deltas(self, deltas: list[ChoiceDelta], usage: Usage) -> bytes:
        tail = self._tail(usage)
        if len(deltas) == 1 and deltas[0].logprobs is None and not deltas[0].finish_reason:
            delta = deltas[0]
            if self._head.prompts is not None:
                return self._event(delta, tail)
            return b"".join(
                (self._starts[delta.index], _encode(delta.text), b',"logprobs":null,"finish_reason":null}]', tail)
            )
        return b"".join([self._event(delta, tail) for delta in deltas])

    def _event(self, delta: ChoiceDelta, tail: bytes) -> bytes:
        ids, entries = _ids(self._head, delta), delta.logprobs
        if ids and delta.index not in self._told:
            self._told.add(delta.index)
            ids += b',"prompt_token_ids":' + _encode(self._head.prompt_of(delta.index))
        if delta.prompt_logprobs is not None and self._echo:
            first = self._echo[delta.index // self._per_prompt].first
            entries = prompt_entries(first, delta.prompt_logprobs) + (entries or [])
        logprobs = b"null" if entries is None else _encode(self._logprobs[delta.index].take(entries))
        own = b'"text":' + _encode(delta.text) + b',"logprobs":' + logprobs + ids
        return self._start + finish_choice(delta, own) + tail


def _ids(head: ResponseHead, delta: ChoiceDelta) -> bytes:
    if head.prompts is None or not delta.token_ids:
        return b""
    return b',"token_ids":' + _encode(delta.token_ids)


def finish_choice(delta: ChoiceDelta, own: bytes) -> bytes:
    """A choice with its finish fields: ``own`` is what stands between index and finish reason."""
    reason = _encode(delta.finish_reason or None)
    stop = b',"stop_reason":' + _encode(delta.stop_reason) if delta.finish_reason else b""
    return b'{"index":%d,' % delta.index + own + b',"finish_reason":' + reason + stop + b"}]"


def call_id(response: str, choice: int, part: CallPart) -> str:
    """Id of a tool call: in the model's own format, else one that is unique over responses."""
    return part.id or f"call_{response.partition('-')[2]}_{choice}_{part.index}"
