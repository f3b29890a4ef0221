"""Conversations over several responses: what a request that names an earlier one begins with."""

from __future__ import annotations

import msgspec
from millrace.contracts.responses import StoredResponse

from services.ingress.api.responses_api.requests import InputItem, ResponsesRequest


class _Output(msgspec.Struct):
    output: list[InputItem]


def input_items(request: ResponsesRequest) -> list[InputItem]:
    """The input as items."""
    if isinstance(request.input, str):
        return [InputItem(role="user", content=request.input)]
    return list(request.input)


def with_earlier(request: ResponsesRequest, earlier: StoredResponse) -> ResponsesRequest:
    """The request with the conversation up to the end of an earlier response before its input.

    As OpenAI has it, instructions are not taken over.
    """
    said = msgspec.json.decode(earlier.input, type=list[InputItem])
    answered = msgspec.json.decode(earlier.document, type=_Output).output
    return msgspec.structs.replace(request, input=[*said, *answered, *input_items(request)])
