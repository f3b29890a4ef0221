"""Responses without streaming: deltas are collected, and the body is built at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from services.ingress.api.cascade_reports import cascade_object, usage_object
from services.ingress.api.logprobs import CompletionLogprobs, chat_logprobs, prompt_entries
from services.ingress.api.streams import EchoedPrompt, ResponseHead, call_id
from services.ingress.api.tools import ToolMode, ToolPlan
from services.ingress.calls.messages import CallPart, CascadeReport, ChoiceDelta, DeltaLogprob, Usage

_encode = msgspec.json.Encoder().encode


class CollectedResponse(Protocol):
    """Collector of deltas that builds one body."""

    def deltas(self, deltas: list[ChoiceDelta]) -> None: ...

    def body(self, usage: Usage, report: CascadeReport | None = None) -> bytes: ...


@dataclass(slots=True, eq=False)
class _Choice:
    """Output of one choice so far."""

    texts: list[str] = field(default_factory=list)
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)
    logprobs: list[DeltaLogprob] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def add(self, delta: ChoiceDelta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        self.reasoning += delta.reasoning
        for part in delta.calls:
            self._add_call(part)
        self.token_ids += delta.token_ids or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.finish_reason:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    def _add_call(self, part: CallPart) -> None:
        if part.index == len(self.calls):
            self.calls.append(part)
        else:
            begun = self.calls[part.index]
            self.calls[part.index] = msgspec.structs.replace(begun, arguments=begun.arguments + part.arguments)


class _Collected:
    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._choices = [_Choice() for _ in range(head.choices)]

    def deltas(self, deltas: list[ChoiceDelta]) -> None:
        for delta in deltas:
            self._choices[delta.index].add(delta)

    def _document(
        self, kind: str, choices: list[dict[str, Any]], usage: Usage, report: CascadeReport | None, **more: Any
    ) -> bytes:
        head = self._head
        document = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "system_fingerprint": None,
            "usage": usage_object(usage, report),
            **more,
        }
        return _encode(document if report is None else document | {"cascade": cascade_object(report)})


class ChatResponse(_Collected):
    """A chat completion."""

    def __init__(self, head: ResponseHead, tools: ToolPlan, echo: list[EchoedPrompt] | None = None) -> None:
        super().__init__(head)
        self._tools = tools
        self._echo = echo[0].text if echo else ""

    def body(self, usage: Usage, report: CascadeReport | None = None) -> bytes:
        choices = [self._choice(i, choice) for i, choice in enumerate(self._choices)]
        told, prompts = self._choices[0].prompt_logprobs, self._head.prompts or []
        prompt = {"prompt_logprobs": told, "prompt_token_ids": prompts[0] if len(prompts) == 1 else None}
        return self._document("chat.completion", choices, usage, report, **prompt)

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(index, choice),
            "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": None if self._head.prompts is None else choice.token_ids,
        }

    def _message(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, calls = "".join(choice.texts), choice.calls
        forced = self._tools.mode in (ToolMode.NAMED, ToolMode.REQUIRED)
        if forced and choice.finish_reason == "length":  # as vLLM has it: a call that is cut is left out
            calls = [call for call in calls if _is_whole(call.arguments)]
        if calls:
            text = text.strip()
        text = self._echo + text
        silent = (calls or choice.reasoning) and not forced
        message: dict[str, Any] = {"role": "assistant", "content": (text or None) if silent else text, "refusal": None}
        if choice.reasoning:
            message |= {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call_id(self._head.id, index, call),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message


def _is_whole(arguments: str) -> bool:
    try:
        msgspec.json.decode(arguments.encode())
    except msgspec.DecodeError:
        return False
    return True


class CompletionResponse(_Collected):
    """A completion."""

    def __init__(self, head: ResponseHead, echo: list[EchoedPrompt]) -> None:
        super().__init__(head)
        self._echo = echo

    def body(self, usage: Usage, report: CascadeReport | None = None) -> bytes:
        choices = [self._choice(i, choice) for i, choice in enumerate(self._choices)]
        return self._document("text_completion", choices, usage, report)

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, entries, told = "".join(choice.texts), choice.logprobs, self._head.prompts is not None
        if self._echo:
            echoed = self._echo[index * len(self._echo) // self._head.choices]
            text = echoed.text + text
            if entries is not None and choice.prompt_logprobs is not None:
                entries = prompt_entries(echoed.first, choice.prompt_logprobs) + entries
        return {
            "index": index,
            "text": text,
            "logprobs": None if entries is None else CompletionLogprobs().take(entries),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if told else None,
            "prompt_logprobs": choice.prompt_logprobs,
            "prompt_token_ids": self._head.prompt_of(index) if told else None,
        }
