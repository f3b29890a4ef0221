"""Tools: which requests can have them, what constrains the output, and how the output becomes tool calls.

A call that is asked for (``required``, or a named function) is decoded under a JSON Schema, so it always parses. A
call that the model may choose (``auto``) is read from ``<tool_call>`` tags where the model's template writes them.
Where a model thinks, or calls in another format, vLLM's parsers make the constraint and read the output.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
from millrace.cluster.model_parsers import ModelParsers
from millrace.contracts.worker import StructuredOutput

from services.ingress.api.errors import bad_value, unsupported
from services.ingress.api.requests import ChatRequest, NamedTool, Tool
from services.ingress.api.schema_references import subschemas
from services.ingress.api.structured_outputs import checked_schema, enforced_schema
from services.ingress.api.tokenizer import TemplateTraits

_encode = msgspec.json.Encoder().encode
#: Longest schema of all functions together, bytes: it travels with each submission.
CONSTRAINT_BYTES_MAX = 131_072

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"


class ToolMode(StrEnum):
    """Way in which an output is parsed for tool calls."""

    NONE = "none"  # as text
    NAMED = "named"  # the whole output is the arguments of one function
    REQUIRED = "required"  # the whole output is a JSON array of calls
    TAGGED = "tagged"  # text with calls between tags
    PARSED = "parsed"  # by the parser process


class ToolPlan(msgspec.Struct, frozen=True):
    """Consequences of a request's tools for its output.

    Attributes:
        function: Name of the function that the request names; empty for none.
        structured: Constraint on the output; None for none.
        single: Only the first call counts (``parallel_tool_calls`` false).
    """

    mode: ToolMode = ToolMode.NONE
    function: str = ""
    structured: StructuredOutput | None = None
    single: bool = False


NO_TOOLS = ToolPlan()
NO_PARSERS = ModelParsers()


def plan_tools(request: ChatRequest, traits: TemplateTraits, parsers: ModelParsers = NO_PARSERS) -> ToolPlan:
    """Decide how tools are served for this request, and who reads the output.

    Raises:
        ApiError: 400 where the template has no tools, or a choice cannot be honoured.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none"):
            raise bad_value("tool_choice", "`tool_choice` needs `tools`.")
        return ToolPlan(ToolMode.PARSED) if parsers.reasoning else NO_TOOLS
    if not traits.tools:
        raise unsupported("tools", "`tools` is not supported: this model's chat template does not know them.")
    called = choice.function.name if isinstance(choice, NamedTool) else ""
    for i, tool in enumerate(request.tools):
        if tool.function.parameters is not None:
            # What is only written into the prompt, or read from free text, needs no grammar.
            check = enforced_schema if choice == "required" or tool.function.name == called else checked_schema
            check(tool.function.parameters, f"tools[{i}].function.parameters")
    if called:
        _named(request.tools, called)
    if parsers.needs_vllm and (parsers.reasoning or choice != "none"):
        if not parsers.tool_calls and choice in (None, "auto"):
            raise unsupported("tool_choice", f"`tool_choice` `auto` is not supported: {parsers.why_tool_calls}.")
        if parsers.tool_calls or choice == "none":
            return ToolPlan(ToolMode.PARSED, called)
    if choice == "none":
        return NO_TOOLS
    if choice in (None, "auto"):
        return _auto(request, traits)
    if request.logprobs:
        raise unsupported("logprobs", "`logprobs` with a forced tool call is not supported.")
    if isinstance(choice, NamedTool):
        tool = _named(request.tools, choice.function.name)
        return ToolPlan(ToolMode.NAMED, tool.function.name, _constraint(_arguments_schema(tool)))
    return ToolPlan(ToolMode.REQUIRED, "", _constraint(_calls_schema(request)))


def _auto(request: ChatRequest, traits: TemplateTraits) -> ToolPlan:
    if not traits.hermes_calls:
        raise unsupported(
            "tool_choice",
            "`tool_choice` `auto` is not supported: this model's chat template writes no <tool_call> tags to read "
            "calls from. Use `required`, a named function, or `none`.",
        )
    if request.stream and request.logprobs:
        raise unsupported("logprobs", "`logprobs` with streamed tool calls is not supported.")
    return ToolPlan(ToolMode.TAGGED, single=request.parallel_tool_calls is False)


def _named(tools: list[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise bad_value("tool_choice.function.name", f"`tools` has no function `{name}`.")


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object"}


def _calls_schema(request: ChatRequest) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "parameters": _with_definitions(_arguments_schema(tool), f"f{i}", definitions),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(request.tools or [])
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if definitions:
        schema["$defs"] = definitions
    if request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return schema


def _with_definitions(schema: dict[str, Any], name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema as part of another one. References start at the root: what has some is defined there under a name."""
    if not any("$ref" in node for node in subschemas(schema)):
        return schema
    moved: dict[str, Any] = msgspec.json.decode(_encode(schema))
    for node in subschemas(moved):
        if isinstance(reference := node.get("$ref"), str) and reference.startswith("#"):
            node["$ref"] = f"#/$defs/{name}{reference[1:]}"
    definitions[name] = moved
    return {"$ref": f"#/$defs/{name}"}


def _constraint(schema: dict[str, Any]) -> StructuredOutput:
    text = _encode(schema).decode()
    if len(text) > CONSTRAINT_BYTES_MAX:
        raise bad_value("tools", f"The functions' schemas are longer than {CONSTRAINT_BYTES_MAX} bytes together.")
    return StructuredOutput(json_schema=text)


def tagged_call(text: str) -> tuple[str, str] | None:
    """Name and arguments, JSON text, of the call that stands between two tags; None where it is none."""
    try:
        value = msgspec.json.decode(text.strip().encode(), type=dict[str, Any])
        return str(value["name"]), _encode(value.get("arguments", {})).decode()
    except (msgspec.DecodeError, KeyError):
        return None
