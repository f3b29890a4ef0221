"""Body of POST /v1/responses, as Structs.

Parameters are checked like chat's. Items and their parts are read as they come back from any provider: what they carry
beside the declared fields is ignored, as vLLM ignores it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.ingress.api.requests import (
    MESSAGES_MAX,
    Count,
    JsonObject,
    ReasoningEffort,
    SampledRequest,
    ToolName,
    TopLogprobs,
)


class InputPart(Struct, kw_only=True, omit_defaults=True):
    """A part of an item: text, or an image by its URL."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal", "input_image"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


Parts = list[InputPart]


class InputItem(Struct, kw_only=True, omit_defaults=True):
    """One item of ``input``: a message where ``type`` is left out. Which fields count depends on the type.

    Attributes:
        arguments: JSON text of a function call.
        input: Text of a custom tool's call.
        summary: Of reasoning; read where it has no ``content``.
    """

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None


class SpaceTool(Struct, kw_only=True):
    """A tool of a namespace."""

    type: Literal["function", "custom"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FlatTool(Struct, kw_only=True):
    """A tool. A namespace holds functions; ``custom`` takes free text; hosted tools are taken and never called."""

    type: Literal[
        "function",
        "custom",
        "namespace",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "local_shell",
        "image_generation",
        "tool_search",
    ]
    name: ToolName | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    tools: list[SpaceTool] | None = None


class ChosenTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A choice of one tool, or of some (``allowed_tools``)."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[JsonObject] | None = None


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """Format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Form of the text; ``verbosity`` is taken and without effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Amount of reasoning; summaries are not made: the reasoning itself is given."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(SampledRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MESSAGES_MAX)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=128)] | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    # vLLM's own
    chat_template_kwargs: JsonObject | None = None
    include_reasoning: bool | None = None
    # Taken and without effect.
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonObject | None = None
    client_metadata: JsonObject | None = None
    max_tool_calls: Count | None = None
