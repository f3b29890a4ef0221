"""Errors in the words of the API that was called: chat checks most of a translated request."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from services.ingress.api.errors import ApiError

#: Chat's name of a parameter -> the API's own.
_RESPONSES = {
    r"response_format\.json_schema": "text.format",
    r"response_format": "text.format",
    r"max_completion_tokens": "max_output_tokens",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"tool_choice\.function": "tool_choice",
    r"messages(\[.*)?": "input",
}
_MESSAGES = {
    r"response_format\.json_schema": "output_config.format",
    r"response_format": "output_config.format",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tool_choice\.function": "tool_choice",
}
_POOLED = {r"prompt": "input"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError) -> bytes:
    """The error object of Anthropic's API; the message names the parameter."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


#: Path -> what its API calls chat's parameters, and what its error objects look like.
_DIALECTS: dict[str, tuple[list[tuple[re.Pattern[str], str]], Callable[[ApiError], bytes]]] = {
    path: ([(re.compile(pattern + r"(?!\w)"), own) for pattern, own in names.items()], body)
    for path, names, body in (
        ("/v1/responses", _RESPONSES, ApiError.body),
        *((path, _POOLED, ApiError.body) for path in ("/v1/embeddings", "/pooling", "/classify")),
        ("/v1/messages", _MESSAGES, anthropic_error),
        ("/v1/messages/count_tokens", _MESSAGES, anthropic_error),
    )
}


def error_body(path: str, error: ApiError) -> bytes:
    """The error object of that path's API, with its names of parameters."""
    if path not in _DIALECTS:
        return error.body()
    names, body = _DIALECTS[path]
    message = re.sub("`([^`]+)`", lambda found: f"`{_own(names, found[1])}`", error.message)
    param = _own(names, error.param or "") or None
    return body(ApiError(error.status, message, kind=error.kind, param=param, code=error.code))


def _own(names: list[tuple[re.Pattern[str], str]], name: str) -> str:
    for pattern, own in names:
        found = pattern.match(name)
        if found:
            return found.expand(own) + name[found.end() :]
    return name
