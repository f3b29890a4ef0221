"""Responses requests, read and checked, as requests for a chat."""

from __future__ import annotations

import msgspec

from services.ingress.api.decoding import decode_body
from services.ingress.api.models import ModelRegistry
from services.ingress.api.parsed_requests import ParsedRequest
from services.ingress.api.responses import CollectedResponse
from services.ingress.api.responses_api.events import ResponseBody, ResponseDocument, ResponseStream
from services.ingress.api.responses_api.requests import ResponsesRequest
from services.ingress.api.responses_api.translation import ToolName, chat_request, flat_tools
from services.ingress.api.streams import EventStream, ResponseHead
from services.ingress.api.translated_requests import parse_translated
from services.ingress.api.unsupported import refuse_unsupported


class ResponsesForm(msgspec.Struct, frozen=True):
    """Form of the answer: a response."""

    request: ResponsesRequest
    names: dict[str, ToolName]
    prefix: str = "resp_"

    def stream(self, head: ResponseHead) -> EventStream:
        """Writer of its events."""
        return self._stream(head)

    def collected(self, head: ResponseHead) -> CollectedResponse:
        """Writer of its body."""
        return ResponseBody(self._stream(head))

    def _stream(self, head: ResponseHead) -> ResponseStream:
        return ResponseStream(ResponseDocument(head, self.request, self.names))


def parse_responses_request(body: bytes, models: ModelRegistry) -> ParsedRequest:
    """Read and check a request for a response.

    Raises:
        ApiError: what the client has to change.
    """
    request = decode_body(body, ResponsesRequest)
    refuse_unsupported(request)
    tools = flat_tools(request.tools)
    return parse_translated(chat_request(request, tools), models, ResponsesForm(request, tools.names))
