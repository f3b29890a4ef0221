"""Bodies of requests to models that pool, as vLLM's server takes them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.ingress.api.requests import (
    INT64_MAX,
    MESSAGES_MAX,
    ChatMessage,
    JsonObject,
    Name,
    Salt,
    Size,
    TokenId,
)

#: Texts of one request: OpenAI's own bound.
TEXTS_MAX = 2_048

Input = (
    str
    | Annotated[
        list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
        Meta(min_length=1, max_length=1_000_000, description="All of one kind: strings, token ids, or lists of these."),
    ]
)
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=TEXTS_MAX)]


class PooledRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all of them share. ``model`` may be left out where one is served."""

    model: Name | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    cache_salt: Salt | None = None
    # Taken and without effect; docs/API.md says so.
    user: str | None = None


class InputRequest(PooledRequest, kw_only=True, forbid_unknown_fields=True):
    """Texts, token ids, or a chat."""

    input: Input | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class EmbeddingRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /pooling."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class ClassificationRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /classify."""


class ScoreRequest(PooledRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /score: two of these, in vLLM's names; one text against all, or as many against as many."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankRequest(PooledRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /rerank."""

    query: str
    documents: Texts
    top_n: Size | None = None
