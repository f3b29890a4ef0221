"""Responses requests, read and checked, as requests for a chat."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.ingress.api.answer_forms import Keep, hand_on
from services.ingress.api.models import ModelRegistry
from services.ingress.api.parsed_requests import ParsedRequest
from services.ingress.api.responses import CollectedResponse
from services.ingress.api.responses_api.events import ResponseDocument, ResponseStream
from services.ingress.api.responses_api.requests import ResponsesRequest
from services.ingress.api.responses_api.translation import ToolName, chat_request, flat_tools
from services.ingress.api.streams import EventStream, ResponseHead, StreamBody
from services.ingress.api.translated_requests import parse_translated


class ResponsesForm:
    """Form of the answer: a response.

    Attributes:
        keep: Stores it before its client is told its end.
        head: Of one made in the background, whose id is given out before its call begins; None for others.
        made: Told of the writer of its events.
    """

    prefix = "resp_"

    def __init__(self, request: ResponsesRequest, names: dict[str, ToolName], keep: Keep) -> None:
        self.keep = keep
        self.head: ResponseHead | None = None
        self.made: Callable[[ResponseStream], None] | None = None
        self._request = request
        self._names = names

    def stream(self, head: ResponseHead) -> EventStream:
        stream = self.writer(self.head or head)
        if self.made is not None:
            self.made(stream)
        return stream

    def collected(self, head: ResponseHead) -> CollectedResponse:
        return StreamBody(self.writer(head))

    def writer(self, head: ResponseHead) -> ResponseStream:
        return ResponseStream(ResponseDocument(head, self._request, self._names))


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
    form = ResponsesForm(request, tools.names, keep)
    if begun is None:
        return parse_translated(chat_request(request, tools), models, form)
    request = msgspec.structs.replace(request, stream=True)
    return msgspec.structs.replace(parse_translated(chat_request(request, tools), models, form), begun=begun)
