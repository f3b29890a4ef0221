"""Messages requests to chat requests: blocks to messages, tools to functions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.ingress.api.errors import required
from services.ingress.api.messages_api.requests import (
    Block,
    CountTokensRequest,
    ImagePart,
    ImageSource,
    MessagesRequest,
    NamedFunctionTool,
    TextPart,
    ToolDemand,
    Turn,
)
from services.ingress.api.requests import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Function,
    ImageUrl,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ReasoningEffort,
    ResponseFormat,
    Tool,
    ToolCall,
)

#: What a block of the system's text begins with that differs with each request of Claude Code: it is left out, since
#: no two prompts would share a prefix.
_BILLING = "x-anthropic-billing-header"

#: Fields that chat has under the same name.
_SAME = ("max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt", "cascade")

_encode = msgspec.json.Encoder().encode


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """The chat request that asks for the same; for a count, without bounds and sampling.

    Raises:
        ApiError: 400 for what the client has to change.
    """
    config = request.output_config
    form = None if config is None or config.format is None else config.format.schema
    tools = [_tool(tool) for tool in request.tools or () if tool.type in (None, "custom")]
    last = request.messages[-1]
    chat = ChatRequest(
        model=request.model,
        messages=_messages(request),
        tools=tools or None,
        tool_choice=_choice(request.tool_choice) if tools else None,
        parallel_tool_calls=False if request.tool_choice and request.tool_choice.disable_parallel_tool_use else None,
        reasoning_effort=_effort(request),
        response_format=None if form is None else _format(form),
        chat_template_kwargs=request.chat_template_kwargs,
        continue_final_message=True if last.role == "assistant" and _only_text(last) else None,
    )
    if not isinstance(request, MessagesRequest):
        return chat
    same = {name: getattr(request, name) for name in _SAME}
    return msgspec.structs.replace(chat, stop=request.stop_sequences, **same)


def _messages(request: CountTokensRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if request.system:
        _tell_system(messages, request.system)
    for i, turn in enumerate(request.messages):
        where = f"messages[{i}].content"
        if turn.role == "system":
            _tell_system(messages, turn.content)
        elif isinstance(turn.content, str):
            messages.append(ChatMessage(role=turn.role, content=turn.content))
        elif turn.role == "user":
            messages += _user(turn.content, where)
        else:
            messages.append(_assistant(turn.content, where))
    return messages


def _tell_system(messages: list[ChatMessage], content: str | list[Block]) -> None:
    texts = [content] if isinstance(content, str) else _texts(content)
    told = [text for text in texts if not text.startswith(_BILLING)]
    if told:
        messages.append(ChatMessage(role="system", content=_parts(told)))


def _user(blocks: list[Block], where: str) -> list[ChatMessage]:
    """Results of calls, the images of each behind it as vLLM has it, then what the user says."""
    told = []
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            name = required(block.tool_use_id, f"{where}[{i}].tool_use_id")
            content = [TextPart(text=block.content)] if isinstance(block.content, str) else block.content or []
            text = "\n".join(part.text for part in content if isinstance(part, TextPart))
            told.append(ChatMessage(role="tool", content=text, tool_call_id=name))
            images = [_image(part.source) for part in content if isinstance(part, ImagePart)]
            told += [ChatMessage(role="user", content=images)] if images else []
    parts = [part for block in blocks if (part := _part(block)) is not None]
    if any(part.image_url for part in parts):
        return [*told, ChatMessage(role="user", content=parts)]
    texts = _texts(blocks)
    return [*told, ChatMessage(role="user", content=_parts(texts))] if texts or not told else told


def _part(block: Block) -> ContentPart | None:
    if block.source is not None:
        return _image(block.source)
    return ContentPart(text=block.text) if block.type == "text" and block.text else None


def _image(source: ImageSource) -> ContentPart:
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return ContentPart(type="image_url", image_url=ImageUrl(url=url or ""))


def _assistant(blocks: list[Block], where: str) -> ChatMessage:
    thought = [block.thinking or "" for block in blocks if block.type == "thinking"]
    calls = [_call(block, f"{where}[{i}]") for i, block in enumerate(blocks) if block.type == "tool_use"]
    return ChatMessage(
        role="assistant",
        content=_parts(_texts(blocks)),
        reasoning="".join(thought) if thought else None,
        tool_calls=calls or None,
    )


def _call(block: Block, where: str) -> ToolCall:
    arguments = _encode(block.input or {}).decode()
    function = CalledFunction(name=required(block.name, f"{where}.name"), arguments=arguments)
    return ToolCall(id=required(block.id, f"{where}.id"), type="function", function=function)


def _texts(blocks: list[Block]) -> list[str]:
    return [block.text for block in blocks if block.type == "text" and block.text]


def _parts(texts: list[str]) -> str | list[ContentPart]:
    return [ContentPart(type="text", text=text) for text in texts] if len(texts) > 1 else "".join(texts)


def _only_text(turn: Turn) -> bool:
    """Whether the model is to go on with a turn: it has text and nothing that ends it."""
    if isinstance(turn.content, str):
        return bool(turn.content.strip())
    return bool("".join(_texts(turn.content)).strip()) and all(block.type != "tool_use" for block in turn.content)


def _tool(tool: NamedFunctionTool) -> Tool:
    parameters = {"type": "object", **(tool.input_schema or {})}
    return Tool(type="function", function=Function(name=tool.name, description=tool.description, parameters=parameters))


def _choice(choice: ToolDemand | None) -> Literal["none", "auto", "required"] | NamedTool | None:
    if choice is None:
        return None
    if choice.type == "tool":
        name = required(choice.name, "tool_choice.name")
        return NamedTool(type="function", function=NamedFunction(name=name))
    return "required" if choice.type == "any" else choice.type


def _effort(request: CountTokensRequest) -> ReasoningEffort | None:
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none"
    return None if request.output_config is None else request.output_config.effort


def _format(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="schema", schema=schema))
