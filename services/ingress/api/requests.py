"""Bodies of requests, as Structs. They are the source of validation and of the OpenAPI document.

Every field that OpenAI or vLLM 0.32 documents and that means something here is declared with its bounds;
api/unsupported.py says what to do instead of the others that they know. Everything else is refused as unknown.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.ingress.calls.messages import CascadeOptions

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

#: Choices per prompt: OpenAI's own bound. Prompts times choices have a configured bound besides.
CHOICES_MAX = 128
#: OpenAI allows 4 stop strings; so does this.
STOP_MAX = 4
STOP_LENGTH_MAX = 1_000
#: vLLM's default ``max_logprobs``.
LOGPROBS_MAX = 20
MESSAGES_MAX = 10_000

Name = Annotated[str, Meta(min_length=1, max_length=256)]
StopText = Annotated[str, Meta(min_length=1, max_length=STOP_LENGTH_MAX)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=STOP_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=INT64_MAX)]
Repetition = Annotated[float, Meta(gt=0, le=100)]
Seed = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
Count = Annotated[int, Meta(ge=1, le=INT64_MAX)]
Size = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=256)]
#: Entries (tokens times alternatives) of a prompt's log-probabilities: they travel in one message.
PROMPT_LOGPROBS_MAX = 40_000
Salt = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")]
#: Its keys are looked at in ``sampling.py``, which names those that are wrong.
LogitBias = Annotated[
    dict[Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9]{1,10}$"})], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1_024),
]
TopLogprobs = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]
JsonObject = dict[str, Any]
#: Python's `$`, which JSON Schema writes for this end, is also before a line feed there.
_NAME = Meta(min_length=1, pattern=r"^[a-zA-Z0-9_.-]+\Z")
#: A tool's name for agents, who put the name of its server before it.
ToolName = Annotated[str, _NAME, Meta(max_length=128)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """A named JSON Schema."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """Format of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: exactly one constraint."""

    json: str | JsonObject | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=10_000)] | None = None
    choice: Annotated[list[Annotated[str, Meta(max_length=100)]], Meta(min_length=1, max_length=1_000)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=100_000)] | None = None


class Function(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call; ``parameters`` is a JSON Schema."""

    name: Annotated[str, _NAME, Meta(max_length=64)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool: only functions."""

    type: Literal["function"]
    function: Function


class NamedFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """The name of one of the request's functions."""

    name: str


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """Demand for a call of one function."""

    type: Literal["function"]
    function: NamedFunction


# Fields of messages that are unknown here are ignored, as vLLM does: other providers put theirs into what comes back
# (`cache_control`, `provider_specific_fields`, `thinking_blocks`).


class ImageUrl(Struct, kw_only=True):
    """An image: ``data:image/png;base64,...``, or where it is on the web."""

    url: str


class ContentPart(Struct, kw_only=True):
    """A part of a message: text, or an image."""

    type: Literal["text", "image_url"] = "text"
    text: str | None = None
    image_url: ImageUrl | None = None


class CalledFunction(Struct, kw_only=True):
    """A call that the model made earlier; ``arguments`` is JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """One tool call of an assistant message."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct, kw_only=True):
    """One message. ``reasoning`` is what an assistant thought; ``reasoning_content`` its older name. A ``role`` beside
    OpenAI's is for the template to know.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[list[ContentPart], Meta(min_length=1)] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class SampledRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chats, completions and responses share. ``model`` may be left out where one is served."""

    model: Name | None = None
    stream: bool | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    # vLLM's own
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Salt | None = None
    # Millrace's own
    cascade: CascadeOptions | None = None
    # Taken and without effect; docs/API.md says so.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None


class Shared(SampledRequest, kw_only=True, forbid_unknown_fields=True):
    """Fields that chats and completions share."""

    max_tokens: Count | None = None
    n: Choices | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # vLLM's own
    min_tokens: Size | None = None
    add_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=100)]], Meta(max_length=100)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Taken and without effect.
    store: Literal[False] | None = None


class TransferParams(Struct, kw_only=True, forbid_unknown_fields=True):
    """Of vLLM's ``kv_transfer_params`` what is not about KV: the prompt as another server tokenised it."""

    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1)]


class ChatRequest(Shared, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    kv_transfer_params: TransferParams | None = None
    echo: bool | None = None


class BatchRequest(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions/batch: several chats, each with an answer of its own, not streamed."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]], Meta(min_length=1)
    ]


class CompletionRequest(Shared, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    prompt: (
        Annotated[str, Meta(min_length=1)]
        | Annotated[
            list[Annotated[str, Meta(min_length=1)] | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
            Meta(min_length=1, description="All of one kind: strings, token ids, or lists of token ids."),
        ]
    )
    max_tokens: Size | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a prompt or messages, as vLLM has it."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    return_token_strs: bool | None = None


class LoadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/load_lora_adapter. ``base_model_name``: needed where several models are served."""

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4_096)]
    load_inplace: bool | None = None
    is_3d_lora_weight: Literal[False] | None = None
    base_model_name: Name | None = None


class UnloadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    model: Name | None = None
    tokens: list[TokenId]
