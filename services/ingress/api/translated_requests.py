"""Chat requests that another API's requests were translated to, parsed like a client's own."""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.api.answer_forms import AnswerForm
from services.ingress.api.models import ModelRegistry, ServedModel
from services.ingress.api.parsed_requests import ParsedRequest, check_options, for_each_member, parse_chat
from services.ingress.api.requests import ChatRequest
from services.ingress.api.system_messages import system_first, takes_them_anywhere


def parse_translated(request: ChatRequest, models: ModelRegistry, form: AnswerForm) -> ParsedRequest:
    """Check a request whose answer has another form than chat's.

    Raises:
        ApiError: what the client has to change.
    """
    check_options(request)

    def parse(model: ServedModel) -> ParsedRequest:
        return msgspec.structs.replace(parse_chat(fitting(request, model), model), form=form)

    return for_each_member(request, models, parse)


def fitting(request: ChatRequest, model: ServedModel) -> ChatRequest:
    """The request with its system messages where the model's template takes them."""
    template = model.tokenizer.template
    later = any(message.role in ("system", "developer") for message in request.messages[1:])
    if not later or template is None or takes_them_anywhere(template):
        return request
    return msgspec.structs.replace(request, messages=system_first(request.messages))


def whole_arguments(text: str) -> str:
    """Arguments as an object; those that a model left unfinished as the text that they are: agents send them back."""
    try:
        msgspec.json.decode(text.encode(), type=dict[str, Any])
    except msgspec.DecodeError:
        return msgspec.json.encode({"arguments": text} if text else {}).decode()
    return text
