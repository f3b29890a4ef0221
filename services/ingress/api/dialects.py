"""Errors in the words of the API that was called: chat checks most of a translated request."""

from __future__ import annotations

import re

from services.ingress.api.errors import ApiError

#: Chat's name of a parameter -> the API's own, longest first.
_RESPONSES = {
    r"response_format\.json_schema": "text.format",
    r"response_format": "text.format",
    r"max_completion_tokens": "max_output_tokens",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"tool_choice\.function": "tool_choice",
    r"messages(\[.*)?": "input",
}


#: Path -> what its API calls chat's parameters.
_NAMES = {
    path: [(re.compile(pattern + r"(?!\w)"), own) for pattern, own in names.items()]
    for path, names in (("/v1/responses", _RESPONSES),)
}


def in_own_words(path: str, error: ApiError) -> ApiError:
    """The error with the names of that path's API."""
    names = _NAMES.get(path)
    if names is None:
        return error
    message = re.sub("`([^`]+)`", lambda found: f"`{_own(names, found[1])}`", error.message)
    param = _own(names, error.param or "") or None
    return ApiError(error.status, message, kind=error.kind, param=param, code=error.code, headers=error.headers)


def _own(names: list[tuple[re.Pattern[str], str]], name: str) -> str:
    for pattern, own in names:
        found = pattern.match(name)
        if found:
            return found.expand(own) + name[found.end() :]
    return name
