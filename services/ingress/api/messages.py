"""Chat messages to the prompt's text."""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.api.errors import ApiError, bad_value, missing, unsupported
from services.ingress.api.requests import ChatMessage, ChatRequest, ContentPart, TokenizeRequest
from services.ingress.api.tokenizer import ChatTemplate, TemplateRefused

#: Names that `chat_template_kwargs` may not set: they are the request's own.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def prompt_text(request: ChatRequest | TokenizeRequest, template: ChatTemplate | None) -> str:
    """The rendered prompt.

    Raises:
        ApiError: 400 where the model has no template, it refuses the messages, or the options contradict each other.
    """
    if template is None:
        raise unsupported("messages", "This model has no chat template; use /v1/completions.")
    open_end = bool(request.continue_final_message)
    generate = not open_end if request.add_generation_prompt is None else request.add_generation_prompt
    if open_end and generate:
        raise bad_value(
            "continue_final_message", "`continue_final_message` and `add_generation_prompt` exclude each other."
        )
    extra = template_values(request)
    if not isinstance(request, ChatRequest) and any(map(_has_images, request.messages or [])):
        raise unsupported("messages", "Images are taken by chats alone.")
    messages = [_plain(m, template, f"messages[{i}]") for i, m in enumerate(request.messages or [])]
    tools = msgspec.to_builtins(request.tools) if request.tools else None
    if tools is not None and not template.traits.tools:
        raise unsupported("tools", "`tools` is not supported: this model's chat template does not know them.")
    try:
        text = template.render(messages, tools=tools, add_generation_prompt=generate, **extra)
    except TemplateRefused as error:
        raise ApiError(
            400,
            f"The model's chat template refuses these messages: {error}",
            param="messages",
            code="invalid_messages",
        ) from None
    return _open_end(text, messages[-1]) if open_end else text


def template_values(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Values that the request gives the template besides messages and tools.

    As vLLM has it, an effort also switches thinking on or off, where the request does not.

    Raises:
        ApiError: 400 for a name that is the request's own.
    """
    extra = dict(request.chat_template_kwargs or {})
    for name in extra:
        if name in _RESERVED:
            raise bad_value("chat_template_kwargs", f"`chat_template_kwargs` may not set `{name}`.")
    effort = request.reasoning_effort if isinstance(request, ChatRequest) else None
    if effort is not None:
        extra.setdefault("reasoning_effort", effort)
        extra.setdefault("enable_thinking", effort != "none")
    return extra


def _plain(message: ChatMessage, template: ChatTemplate, param: str) -> dict[str, Any]:
    """A message as templates read it: absent fields left out, content as a string or as parts."""
    content = message.content
    thought = message.reasoning if message.reasoning is not None else message.reasoning_content
    if content is None and not (message.role == "assistant" and (message.tool_calls or thought is not None)):
        raise bad_value(f"{param}.content", f"`{param}.content` is missing.", "missing_parameter")
    role = message.role
    if role == "developer" and not template.traits.developer:
        role = "system"  # OpenAI's newer name for it
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if part.type == "text" and part.text is None:
            raise missing(f"{param}.content[{i}].text")
    out: dict[str, Any] = {"role": role, "content": _content(content, template.traits.content_parts)}
    if message.name is not None:
        out["name"] = message.name
    if thought is not None:
        out["reasoning"] = out["reasoning_content"] = thought
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        out["tool_calls"] = [_call(c, f"{param}.tool_calls[{i}]") for i, c in enumerate(message.tool_calls)]
    return out


def text_of(message: ChatMessage) -> str:
    """A message's text, parts of it joined."""
    return str(_content(message.content, False))


def _has_images(message: ChatMessage) -> bool:
    return isinstance(message.content, list) and any(part.type == "image_url" for part in message.content)


def _content(content: str | list[ContentPart] | None, as_parts: bool) -> Any:
    if as_parts:
        parts = [ContentPart(text=content)] if isinstance(content, str) else content or []
        return [{"type": "image"} if p.type == "image_url" else {"type": "text", "text": p.text} for p in parts]
    if isinstance(content, list):
        return "\n".join(part.text for part in content if part.text is not None)
    return content or ""


def _call(call: Any, param: str) -> dict[str, Any]:
    """Templates write arguments with ``tojson``, so they get them as an object."""
    try:
        arguments = msgspec.json.decode(call.function.arguments.encode()) if call.function.arguments else {}
    except msgspec.DecodeError:
        raise bad_value(f"{param}.function.arguments", f"`{param}.function.arguments` is no valid JSON.") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _open_end(text: str, last: dict[str, Any]) -> str:
    """Cut what the template put after the last message's content."""
    content = last["content"]
    tail = content[-1].get("text", "") if isinstance(content, list) else content
    at = text.rfind(tail.strip())
    if not tail.strip() or at < 0:
        raise bad_value("continue_final_message", "The final message has no text to continue in this template.")
    return text[: at + len(tail.strip())]
