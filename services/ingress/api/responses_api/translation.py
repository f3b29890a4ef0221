"""Responses requests to chat requests: items to messages, flat tools to functions."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Literal

import msgspec

from services.ingress.api.errors import bad_value, missing, required, unsupported
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
    ResponseFormat,
    SampledRequest,
    Tool,
    ToolCall,
)
from services.ingress.api.responses_api.requests import (
    ChosenTool,
    FlatTool,
    InputItem,
    InputPart,
    Parts,
    ResponsesRequest,
    SpaceTool,
)
from services.ingress.api.translated_requests import whole_arguments

#: What `include` may ask for and is given.
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
#: Parameter of the function that stands for a custom tool, as vLLM has it.
CUSTOM_INPUT = "input"
#: What reasoning carried by the client begins with: it is no secret, only opaque.
_CARRIED = "millrace:"

_encode = msgspec.json.Encoder().encode


#: Fields that chat has under the same name.
_SAME = (*SampledRequest.__struct_fields__, "chat_template_kwargs", "parallel_tool_calls", "include_reasoning")


class ToolName(msgspec.Struct, frozen=True):
    """Name by which the client calls a tool that the model knows by another name or kind."""

    name: str
    namespace: str | None = None
    custom: bool = False


class FlatTools(msgspec.Struct, frozen=True):
    """Tools as the model sees them.

    Attributes:
        names: By the function's name, those whose calls are shown in another way.
    """

    functions: list[Tool]
    names: dict[str, ToolName]


def chat_request(request: ResponsesRequest, tools: FlatTools) -> ChatRequest:
    """The chat request that asks for the same.

    Raises:
        ApiError: 400 for what the client has to change.
    """
    wanted = set(request.include or ())
    logprobs = LOGPROBS in wanted or bool(request.top_logprobs)
    if logprobs and tools.functions:
        raise unsupported("include", "Log-probabilities with `tools` are not supported.")
    form = request.text.format if request.text is not None else None
    functions, choice = _choice(request.tool_choice, tools)
    return ChatRequest(
        **{name: getattr(request, name) for name in _SAME},
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        response_format=None if form is None else _response_format(form),
        logprobs=logprobs or None,
        top_logprobs=request.top_logprobs if logprobs else None,
        tools=functions or None,
        tool_choice=choice if functions else None,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
    )


def flat_tools(tools: list[FlatTool] | None) -> FlatTools:
    """Functions for the tools that a model can call; hosted ones are left out.

    Raises:
        ApiError: 400 for a tool without a name.
    """
    functions: list[Tool] = []
    names: dict[str, ToolName] = {}
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if tool.type == "function":
            functions.append(_function(tool, required(tool.name, f"{where}.name")))
        elif tool.type == "custom":
            name = required(tool.name, f"{where}.name")
            names[name] = ToolName(name, custom=True)
            functions.append(_function(tool, name))
        elif tool.type == "namespace":
            for inner in tool.tools or ():
                name = flat_name(required(tool.name, f"{where}.name"), inner.name)
                names[name] = ToolName(inner.name, tool.name, custom=inner.type == "custom")
                functions.append(_function(inner, name))
    return FlatTools(functions, names)


def flat_name(namespace: str | None, name: str) -> str:
    """Name of a namespace's function for the model, as vLLM writes it."""
    return f"{namespace}__{name}" if namespace else name


def carried_reasoning(text: str) -> str:
    """Reasoning for a client that sends it back unread."""
    return base64.b64encode((_CARRIED + text).encode()).decode()


def _read_carried(text: str) -> str:
    """Reasoning that came back; empty where another server wrote it."""
    try:
        read = base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return read.removeprefix(_CARRIED) if read.startswith(_CARRIED) else ""


def _function(tool: FlatTool | SpaceTool, name: str) -> Tool:
    parameters = tool.parameters
    if tool.type == "custom":
        text = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
        parameters = text | {"additionalProperties": False}
    function = Function(name=name, description=tool.description, parameters=parameters, strict=tool.strict)
    return Tool(type="function", function=function)


def _choice(
    choice: str | ChosenTool | None, tools: FlatTools
) -> tuple[list[Tool], Literal["none", "auto", "required"] | NamedTool | None]:
    """Functions that may be called, and chat's choice of them."""
    functions = tools.functions
    if not isinstance(choice, ChosenTool):
        if choice == "required" and not functions:
            raise bad_value("tool_choice", "`tool_choice` `required` needs a function in `tools`.")
        return functions, choice  # type: ignore[return-value]
    known = {tool.function.name: tool for tool in functions}
    if choice.type == "allowed_tools":
        asked = [_chosen(known, tools, each.get("name")) for each in choice.tools or ()]
        return [known[name] for name in dict.fromkeys(asked)], choice.mode or "auto"
    name = _chosen(known, tools, choice.name)
    return functions, NamedTool(type="function", function=NamedFunction(name=name))


def _chosen(known: dict[str, Tool], tools: FlatTools, name: Any) -> str:
    """The function's name for a chosen one, which may be that within a namespace."""
    if name in known:
        return str(name)
    found = [flat for flat, shown in tools.names.items() if shown.name == name]
    if len(found) != 1:
        raise bad_value("tool_choice.name", f"`tools` has no function `{str(name)[:100]}`.")
    return found[0]


def _response_format(form: Any) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    named = JsonSchemaFormat(name=form.name or "schema", schema=form.schema, strict=form.strict)
    return ResponseFormat(type="json_schema", json_schema=named)


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    told = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*told, ChatMessage(role="user", content=request.input)]
    turns = _Turns()
    for i, item in enumerate(request.input):
        turns.add(item, f"input[{i}]")
    return told + turns.messages()


class _Turns:
    """Messages from items. What the model said in one turn (reasoning, text, calls) is one message."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._said: dict[str, Any] = {}

    def messages(self) -> list[ChatMessage]:
        self._end_turn()
        return self._messages

    def add(self, item: InputItem, where: str) -> None:
        match item.type:
            case "message" if item.role == "assistant":
                if "content" in self._said or "tool_calls" in self._said:
                    self._end_turn()
                self._said["content"] = _content(item.content, f"{where}.content")
            case "message":
                role = required(item.role, f"{where}.role")
                self._tell(ChatMessage(role=role, content=_content(item.content, f"{where}.content")))
            case "function_call" | "custom_tool_call":
                self._said.setdefault("tool_calls", []).append(_call(item, where))
            case "reasoning":
                self._reasoning(item)
            case _:
                output = _content(item.output, f"{where}.output")
                call = required(item.call_id, f"{where}.call_id")
                self._tell(ChatMessage(role="tool", content=output, tool_call_id=call))

    def _tell(self, message: ChatMessage) -> None:
        self._end_turn()
        self._messages.append(message)

    def _reasoning(self, item: InputItem) -> None:
        if self._said:
            self._end_turn()
        parts = item.content if isinstance(item.content, list) else None
        text = "\n".join(part.text or "" for part in parts or item.summary or ())
        self._said["reasoning"] = text if parts else _read_carried(item.encrypted_content or "") or text

    def _end_turn(self) -> None:
        said, self._said = self._said, {}
        if said:
            self._messages.append(ChatMessage(role="assistant", **said))


def _content(content: str | Parts | None, where: str) -> str | list[ContentPart]:
    if content is None:
        raise missing(where)
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content] or [ContentPart(text="")]
    return parts[0].text if len(parts) == 1 and parts[0].text is not None else parts


def _part(part: InputPart) -> ContentPart:
    if part.type != "input_image":
        return ContentPart(text=part.text or part.refusal or "")
    return ContentPart(type="image_url", image_url=None if part.image_url is None else ImageUrl(url=part.image_url))


def _call(item: InputItem, where: str) -> ToolCall:
    name = required(item.name, f"{where}.name")
    arguments = whole_arguments(item.arguments or "")
    if item.type == "custom_tool_call":
        arguments = _encode({CUSTOM_INPUT: item.input or ""}).decode()
    function = CalledFunction(name=flat_name(item.namespace, name), arguments=arguments)
    return ToolCall(id=required(item.call_id, f"{where}.call_id"), type="function", function=function)
