"""Messages requests, read and checked, as requests for a chat."""

from __future__ import annotations

from services.ingress.api.answer_forms import written_form
from services.ingress.api.decoding import decode_body
from services.ingress.api.messages_api.events import MessageStream
from services.ingress.api.messages_api.requests import CountTokensRequest, MessagesRequest
from services.ingress.api.messages_api.translation import chat_request
from services.ingress.api.models import ModelRegistry
from services.ingress.api.parsed_requests import ParsedRequest
from services.ingress.api.translated_requests import parse_translated


def parse_messages_request(
    body: bytes, models: ModelRegistry, kind: type[CountTokensRequest] = MessagesRequest
) -> ParsedRequest:
    """Read and check a request for a message, or for the number of its tokens (CountTokensRequest).

    Raises:
        ApiError: what the client has to change.
    """
    return parse_translated(chat_request(decode_body(body, kind)), models, written_form("msg_", MessageStream))
