"""System messages behind the first message, which agents send and some chat templates refuse."""

from __future__ import annotations

from services.ingress.api.requests import ChatMessage
from services.ingress.api.tokenizer import ChatTemplate, TemplateRefused

_PROBE = [{"role": role, "content": "t"} for role in ("system", "system", "user", "system", "user")]
_SYSTEM = ("system", "developer")


def takes_them_anywhere(template: ChatTemplate) -> bool:
    """Whether a template renders system messages at any place."""
    messages = [m | {"content": [{"type": "text", "text": "t"}]} for m in _PROBE]
    try:
        template.render(messages if template.traits.content_parts else _PROBE, tools=None, add_generation_prompt=True)
    except TemplateRefused:
        return False
    return True


def system_first(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The same messages with one system message, the first; what is said in later ones goes there."""
    told = [_text(m) for m in messages if m.role in _SYSTEM]
    rest = [m for m in messages if m.role not in _SYSTEM]
    return [ChatMessage(role="system", content="\n\n".join(told)), *rest] if told else rest


def _text(message: ChatMessage) -> str:
    content = message.content
    return content or "" if not isinstance(content, list) else "\n".join(part.text or "" for part in content)
