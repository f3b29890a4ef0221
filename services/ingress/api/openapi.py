"""The OpenAPI 3.1 document, generated from the request Structs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from services.ingress.api.messages_api.requests import CountTokensRequest, MessagesRequest
from services.ingress.api.pooling_api.requests import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from services.ingress.api.requests import (
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    SampledRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from services.ingress.api.responses_api.requests import ResponsesRequest
from services.ingress.api.unsupported import OF_ONE_CHAT

_REF = "#/components/schemas/{name}"
_OBJECT, _TEXT, _INTEGER, _TEXT_OR_NULL = (
    {"type": kind} for kind in ("object", "string", "integer", ["string", "null"])
)


def _with(**properties: Any) -> dict[str, Any]:
    """Schema of an object that has all of these."""
    return {"type": "object", "required": list(properties), "properties": properties}


_ERROR = _with(error=_with(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL))
_ANTHROPIC_ERROR = _with(type={"const": "error"}, error=_with(type=_TEXT, message=_TEXT))
_USAGE = _with(prompt_tokens=_INTEGER, completion_tokens=_INTEGER, total_tokens=_INTEGER)
_LIST = {"type": "array", "items": _OBJECT}


@lru_cache(maxsize=1)
def openapi_body(version: str, served: tuple[tuple[str, ...], ...]) -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(openapi_document(version, *served))


def openapi_document(version: str, models: Sequence[str], adapters: Sequence[str], cascades: Sequence[str]) -> Any:
    """The document of an ingress that serves these."""
    posts = _posts()
    kinds = dict.fromkeys(kind for _, _, kind, _ in posts.values())
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    components: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schemas).replace(rb'\\Z"', b'$"'))
    for name in OF_ONE_CHAT:
        del components["BatchRequest"]["properties"][name]
    for kind in kinds:
        if "model" in kind.__struct_fields__:
            properties = components[kind.__name__]["properties"]
            further = cascades if issubclass(kind, SampledRequest | CountTokensRequest) else ()
            none = [None] if len(models) == 1 and "default" in properties["model"] else []
            properties["model"] = {"enum": [*models, *adapters, *further, *none]}
    components |= {
        "Error": _ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
        "Usage": _USAGE,
        "Response": _with(object=_TEXT, choices=_LIST, id=_TEXT, model=_TEXT, created=_INTEGER, usage=_ref("Usage")),
        "Models": _with(object=_TEXT, data=_LIST),
    }
    stored = _get("response", "A stored response.", _OBJECT, parameter="response_id")
    ping = _get("ping", "The same, as SageMaker asks.", _OBJECT, busy=True)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Millrace",
            "version": version,
            "description": "The OpenAI API over many engine instances; docs/API.md says what differs.",
        },
        "paths": {
            **{path: _post(*each) for path, each in posts.items()},
            "/v1/responses/{response_id}": stored | {"delete": stored["get"] | {"operationId": "delete_response"}},
            "/v1/responses/{response_id}/cancel": {"post": stored["get"] | {"operationId": "cancel_response"}},
            "/v1/models": _get("models", "The served models.", _ref("Models")),
            "/v1/models/{model}": _get("model", "One served model.", _OBJECT, parameter="model"),
            "/health": _get("health", "Whether this process is up, and NATS in reach.", _OBJECT, busy=True),
            "/ping": ping | {"post": ping["get"] | {"operationId": "ping_post"}},
            "/tokenizer_info": _get("tokenizer", "What the one model's folder says.", _OBJECT),
            "/load": _get("load", "Open requests of this ingress.", _OBJECT),
            "/ready": _get("ready", "Whether every model has an instance.", _OBJECT, busy=True),
            "/version": _get("version", "The version.", _OBJECT),
            "/metrics": _get("metrics", "Prometheus metrics.", _TEXT, media="text/plain"),
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _posts() -> dict[str, tuple[str, str, type[msgspec.Struct], dict[str, Any]]]:
    """Path -> name and summary of the operation, its body, and the schema of its answer."""
    response = _ref("Response")
    rerank = "Documents in falling order of relevance."
    return {
        "/v1/chat/completions": ("chat", "A chat completion.", ChatRequest, response),
        "/v1/chat/completions/batch": ("chat_batch", "Several chats.", BatchRequest, response),
        "/v1/completions": ("complete", "A completion.", CompletionRequest, response),
        "/invocations": ("invoke", "A chat or a completion.", CompletionRequest, response),
        "/v1/responses": ("respond", "A response.", ResponsesRequest, _OBJECT),
        "/v1/messages": ("message", "A message.", MessagesRequest, _OBJECT),
        "/v1/messages/count_tokens": ("count", "Tokens of a message.", CountTokensRequest, _OBJECT),
        "/tokenize": ("tokenize", "Text or messages to token ids.", TokenizeRequest, _OBJECT),
        "/detokenize": ("detokenize", "Token ids to text.", DetokenizeRequest, _OBJECT),
        "/v1/embeddings": ("embed", "Vectors of texts.", EmbeddingRequest, _OBJECT),
        "/pooling": ("pool", "What the model pools of texts.", PoolingRequest, _OBJECT),
        "/classify": ("classify", "Classes of texts.", ClassificationRequest, _OBJECT),
        "/score": ("score", "Scores of pairs of texts.", ScoreRequest, _OBJECT),
        "/v1/score": ("score_v1", "The same.", ScoreRequest, _OBJECT),
        "/rerank": ("rerank", rerank, RerankRequest, _OBJECT),
        "/v1/rerank": ("rerank_v1", "The same.", RerankRequest, _OBJECT),
        "/v2/rerank": ("rerank_v2", "The same.", RerankRequest, _OBJECT),
        "/v1/load_lora_adapter": ("load", "Load an adapter.", LoadAdapterRequest, _TEXT),
        "/v1/unload_lora_adapter": ("unload", "Unload it.", UnloadAdapterRequest, _TEXT),
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def _json(schema: dict[str, Any], description: str, media: str = "application/json") -> dict[str, Any]:
    return {"description": description, "content": {media: {"schema": schema}}}


def _error(schema: str = "Error") -> dict[str, Any]:
    return _json(_ref(schema), "An error; docs/API.md has each status.")


def _post(name: str, summary: str, request: type[msgspec.Struct], response: dict[str, Any]) -> dict[str, Any]:
    answer = _json(response, "The answer.", "text/plain" if response is _TEXT else "application/json")
    if request in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest):
        answer["content"]["text/event-stream"] = {"schema": _with(data=_TEXT)}
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "security": [{}, {"key": []}],
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request.__name__)}}},
            "responses": {
                "200": answer,
                "default": _error("AnthropicError" if issubclass(request, CountTokensRequest) else "Error"),
            },
        }
    }


def _get(
    name: str,
    summary: str,
    response: dict[str, Any],
    *,
    parameter: str = "",
    media: str = "application/json",
    busy: bool = False,
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "responses": {"200": _json(response, "The answer.", media), "default": _error()},
    }
    if parameter:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": schema}]
    if busy:
        operation["responses"]["503"] = _json(response, "Not yet.")
    return {"get": operation}
