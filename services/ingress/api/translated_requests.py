"""Chat requests that another API's requests were translated to, parsed like a client's own.

Agents send system messages behind the first message, which some chat templates refuse.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.api.answer_forms import AnswerForm
from services.ingress.api.models import ModelRegistry, ServedModel
from services.ingress.api.parsed_requests import ParsedRequest, check_options, for_each_member, parse_chat
from services.ingress.api.requests import ChatMessage, ChatRequest
from services.ingress.api.tokenizer import ChatTemplate, TemplateRefused

_PROBE = [{"role": role, "content": "t"} for role in ("system", "system", "user", "system", "user")]
_SYSTEM = ("system", "developer")


def parse_translated(request: ChatRequest, models: ModelRegistry, form: AnswerForm) -> ParsedRequest:
    """Check a request whose answer has another form than chat's.

    Raises:
        ApiError: what the client has to change.
    """
    check_options(request)

    def parse(model: ServedModel) -> ParsedRequest:
        return msgspec.structs.replace(parse_chat(_fitting(request, model), model), form=form)

    return for_each_member(request, models, parse)


def _fitting(request: ChatRequest, model: ServedModel) -> ChatRequest:
    """The request with its system messages where the model's template takes them."""
    template = model.tokenizer.template
    later = any(message.role in _SYSTEM for message in request.messages[1:])
    if not later or template is None or _takes_them_anywhere(template):
        return request
    return msgspec.structs.replace(request, messages=_system_first(request.messages))


def whole_arguments(text: str) -> str:
    """Arguments as an object; those that a model left unfinished as the text that they are: agents send them back."""
    try:
        msgspec.json.decode(text.encode(), type=dict[str, Any])
    except msgspec.DecodeError:
        return msgspec.json.encode({"arguments": text} if text else {}).decode()
    return text


def _takes_them_anywhere(template: ChatTemplate) -> bool:
    """Whether a template renders system messages at any place."""
    messages = [m | {"content": [{"type": "text", "text": "t"}]} for m in _PROBE]
    try:
        template.render(messages if template.traits.content_parts else _PROBE, tools=None, add_generation_prompt=True)
    except TemplateRefused:
        return False
    return True


def _system_first(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The same messages with one system message, the first; what is said in later ones goes there."""
    told = [_text(m) for m in messages if m.role in _SYSTEM]
    rest = [m for m in messages if m.role not in _SYSTEM]
    return [ChatMessage(role="system", content="\n\n".join(told)), *rest] if told else rest


def _text(message: ChatMessage) -> str:
    content = message.content
    return content or "" if not isinstance(content, list) else "\n".join(part.text or "" for part in content)
