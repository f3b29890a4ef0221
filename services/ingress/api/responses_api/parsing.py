"""Responses requests, checked, as requests for a chat, and the conversation that one of them goes on with."""

from __future__ import annotations

import msgspec
from millrace.contracts.responses import StoredResponse

from services.ingress.api.answer_forms import Keep, hand_on, written_form
from services.ingress.api.models import ModelRegistry
from services.ingress.api.parsed_requests import ParsedRequest
from services.ingress.api.responses_api.events import ResponseStream
from services.ingress.api.responses_api.requests import InputItem, ResponsesRequest
from services.ingress.api.responses_api.translation import chat_request, flat_tools
from services.ingress.api.streams import ResponseHead
from services.ingress.api.translated_requests import parse_translated


def parse_responses(
    request: ResponsesRequest, models: ModelRegistry, *, keep: Keep = hand_on, begun: list[int] | None = None
) -> ParsedRequest:
    """Check a request for a response.

    Args:
        begun: Output tokens that a response in the background has; None for one with a client.

    Raises:
        ApiError: what the client has to change.
    """
    tools = flat_tools(request.tools)

    def stream(head: ResponseHead) -> ResponseStream:
        return ResponseStream(head, request, tools.names)

    form = written_form("resp_", stream, keep)
    chat = chat_request(request, tools)
    if begun is not None:
        chat.stream = True
    return msgspec.structs.replace(parse_translated(chat, models, form), begun=begun)


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
