"""Chat requests as vLLM's parsers see them: without messages, but for the calls that those have already."""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.api.messages import template_values
from services.ingress.api.requests import ChatRequest

_encode = msgspec.json.Encoder().encode


def parser_request(request: ChatRequest) -> bytes:
    """JSON of vLLM's ChatCompletionRequest.

    A forced call keeps to its function's schema here, so its functions are ``strict``.
    """
    body: dict[str, Any] = {
        "messages": [_calls_of(message.tool_calls) for message in request.messages if message.tool_calls],
        "chat_template_kwargs": template_values(request),
        "include_reasoning": request.include_reasoning is not False,
        "skip_special_tokens": request.skip_special_tokens is not False,
    }
    if request.reasoning_effort is not None:
        body["reasoning_effort"] = request.reasoning_effort
    if request.tools:
        forced = request.tool_choice not in (None, "auto", "none")
        tools = msgspec.to_builtins(request.tools)
        for tool in tools if forced else ():
            tool["function"]["strict"] = True
        body |= {"tools": tools, "tool_choice": msgspec.to_builtins(request.tool_choice) or "auto"}
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
        for name in ("response_format", "structured_outputs"):
            if (given := getattr(request, name)) is not None:
                body[name] = {key: value for key, value in msgspec.to_builtins(given).items() if value is not None}
    return _encode(body)


def _calls_of(calls: list[Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": msgspec.to_builtins(calls)}
