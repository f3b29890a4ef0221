"""Bodies of POST /v1/messages and /v1/messages/count_tokens, as Structs.

Parameters are checked like chat's. What blocks carry beside the declared fields (``cache_control``) is ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.ingress.api.requests import (
    MESSAGES_MAX,
    STOP_MAX,
    Count,
    JsonObject,
    Name,
    ReasoningEffort,
    Salt,
    StopText,
    Temperature,
    ToolName,
    TopK,
    TopP,
)
from services.ingress.calls.messages import CascadeOptions


class ImageSource(Struct, kw_only=True):
    """An image: its data, or where it is on the web."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class TextPart(Struct, kw_only=True, tag_field="type", tag="text"):
    """A part of a call's result."""

    text: str


class ImagePart(Struct, kw_only=True, tag_field="type", tag="image"):
    """An image of a call's result."""

    source: ImageSource


class Block(Struct, kw_only=True):
    """A part of a message. Which fields count depends on the type.

    Attributes:
        source: Of an image.
        id, name, input: Of a call.
        tool_use_id, content: Of its result.
    """

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"]
    text: str | None = None
    source: ImageSource | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | list[TextPart | ImagePart] | None = None


Blocks = list[Block]


class Turn(Struct, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class NamedFunctionTool(Struct, kw_only=True):
    """A tool. One whose type is not ``custom`` is Anthropic's own: taken and never called."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None


class ToolDemand(Struct, kw_only=True, forbid_unknown_fields=True):
    """Choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks; the budget is taken and without effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: str | None = None


class OutputFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON Schema for the text."""

    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Amount of reasoning, and form of the text."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens, and what messages share with it."""

    model: Name
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: str | Blocks | None = None
    tools: Annotated[list[NamedFunctionTool], Meta(max_length=256)] | None = None
    tool_choice: ToolDemand | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    # vLLM's own
    chat_template_kwargs: JsonObject | None = None
    # Taken and without effect; docs/API.md says so.
    cache_control: JsonObject | None = None
    context_management: JsonObject | None = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopText], Meta(max_length=STOP_MAX)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    cache_salt: Salt | None = None
    # Millrace's own
    cascade: CascadeOptions | None = None
    # Taken and without effect.
    metadata: JsonObject | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
