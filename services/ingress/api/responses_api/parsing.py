"""Responses requests, read and checked, as requests for a chat."""

from __future__ import annotations

import msgspec

from services.ingress.api.answer_forms import Keep, hand_on, written_form
from services.ingress.api.models import ModelRegistry
from services.ingress.api.parsed_requests import ParsedRequest
from services.ingress.api.responses_api.events import ResponseDocument, ResponseStream
from services.ingress.api.responses_api.requests import ResponsesRequest
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
        return ResponseStream(ResponseDocument(head, request, tools.names))

    form = written_form("resp_", stream, keep)
    chat = chat_request(request, tools)
    if begun is not None:
        chat.stream = True
    return msgspec.structs.replace(parse_translated(chat, models, form), begun=begun)
