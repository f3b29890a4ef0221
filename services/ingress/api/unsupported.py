"""Parameters that are known and not supported: which values change nothing, and what to say of the others.

The Structs of requests do not declare them, but for those that other requests of the same Struct may use.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from msgspec import UNSET, Struct, defstruct

from services.ingress.api.errors import unsupported
from services.ingress.api.messages_api.requests import CountTokensRequest, MessagesRequest
from services.ingress.api.pooling_api.requests import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from services.ingress.api.requests import BatchRequest, ChatRequest, CompletionRequest
from services.ingress.api.responses_api.requests import ResponsesRequest

_GUIDED = "use `structured_outputs` or `response_format`"

#: Field -> (values that mean the same as leaving it out, what to do instead).
_SHARED: dict[str, tuple[tuple[Any, ...], str]] = {
    "length_penalty": ((None, 1.0), "there is no beam search"),
    "use_beam_search": ((None, False), "there is no beam search"),
    "spaces_between_special_tokens": ((None, True), "leave it out"),
    "priority": ((None, 0), "all requests have one priority"),
    "guided_json": ((None,), _GUIDED),
    "guided_regex": ((None,), _GUIDED),
    "guided_choice": ((None,), _GUIDED),
    "guided_grammar": ((None,), _GUIDED),
    "guided_decoding_backend": ((None,), _GUIDED),
}
_CHAT: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((None,), "the output is text"),
    "modalities": ((None, ["text"]), "the output is text"),
    "prediction": ((None,), "leave it out"),
    "verbosity": ((None,), "leave it out"),
    "web_search_options": ((None,), "leave it out"),
    "functions": ((None, []), "use `tools`"),
    "function_call": ((None, "none"), "use `tool_choice`"),
    "chat_template": ((None,), "the model's own template is used"),
    "documents": ((None, []), "put them into a message"),
}
_ALONE = "send such a chat alone"
_BATCH: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "use `n` of a chat"),
    "early_stopping": ((None, False), "there is no beam search"),
    "n": ((None, 1), _ALONE),
    "stream": ((None, False), _ALONE),
    "stream_options": ((None,), _ALONE),
    "tools": ((None, []), _ALONE),
    "tool_choice": ((None, "none"), _ALONE),
    "continue_final_message": ((None, False), _ALONE),
    "prompt_logprobs": ((None,), _ALONE),
    "echo": ((None, False), _ALONE),
    "kv_transfer_params": ((None,), _ALONE),
}
_COMPLETION: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "use `n`"),
    "suffix": ((None, ""), "leave it out"),
    "prompt_embeds": ((None,), "send text or token ids"),
}
_STATELESS = "send the whole conversation as `input`"
_RESPONSES: dict[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((None,), _STATELESS),
    "prompt": ((None,), "send `input`"),
    "truncation": ((None, "disabled"), "shorten the input"),
    "moderation": ((None,), "leave it out"),
    "context_management": ((None, []), "shorten the input"),
    "priority": ((None, 0), "all requests have one priority"),
    "enable_response_messages": ((None, False), "use `/tokenize` on the messages"),
    "previous_input_messages": ((None,), _STATELESS),
}
_COUNT: dict[str, tuple[tuple[Any, ...], str]] = {"mcp_servers": ((None, []), "call the tools yourself")}
_MESSAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((None,), "run code yourself"),
    "inference_geo": ((None,), "leave it out"),
}
_POOLED: dict[str, tuple[tuple[Any, ...], str]] = {
    "priority": ((None, 0), "all requests have one priority"),
    "padding": ((None, "do_not_pad"), "leave it out"),
}
_VECTORS: dict[str, tuple[tuple[Any, ...], str]] = {
    "embed_dtype": ((None, "float32"), "round the numbers yourself"),
    "endianness": ((None, "native", "little"), "base64 is little-endian"),
}
_CUT = "use `truncate_prompt_tokens`"
_PAIRS: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_tokens_per_query": ((None, 0), _CUT),
    "max_tokens_per_doc": ((None, 0), _CUT),
    "instruction": ((None,), "put it into the query"),
    "chat_template_kwargs": ((None, {}), "pairs have no template"),
}
_UNSUPPORTED: dict[type[Struct], dict[str, tuple[tuple[Any, ...], str]]] = {
    ChatRequest: _SHARED | _CHAT,
    BatchRequest: _SHARED | _CHAT | _BATCH,
    CompletionRequest: _SHARED | _COMPLETION,
    ResponsesRequest: _RESPONSES,
    CountTokensRequest: _COUNT,
    MessagesRequest: _COUNT | _MESSAGES,
    EmbeddingRequest: _POOLED | _VECTORS,
    PoolingRequest: _POOLED | _VECTORS,
    ClassificationRequest: _POOLED,
    ScoreRequest: _POOLED | _PAIRS,
    RerankRequest: _POOLED | _PAIRS,
}

#: Type -> (reads all these fields of a request, what it reads where the client sent none).
_ABSENT: dict[type[Struct], tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    kind: (attrgetter(*fields), (UNSET,) * len(fields)) for kind, fields in _UNSUPPORTED.items()
}

#: Type -> field -> what to do instead.
HINTS = {kind: {name: hint for name, (_, hint) in fields.items()} for kind, fields in _UNSUPPORTED.items()}


def with_unsupported(kind: type[Struct]) -> type[Struct]:
    """A Struct that also takes the parameters of its kind that are not supported."""
    fields = [(name, Any, UNSET) for name in _UNSUPPORTED.get(kind, {}) if name not in kind.__struct_fields__]
    return defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True)


def refuse_unsupported(request: Struct, kind: type[Struct]) -> None:
    """Check that no unsupported parameter asks for anything.

    Args:
        request: Of ``with_unsupported(kind)``.

    Raises:
        ApiError: 400 naming the first one that does.
    """
    if kind not in _UNSUPPORTED:
        return
    read, absent = _ABSENT[kind]
    if read(request) == absent:
        return
    for name, (harmless, hint) in _UNSUPPORTED[kind].items():
        value = getattr(request, name)
        if value is UNSET:
            continue
        # A bool equals an int in Python: `best_of: true` is not `best_of: 1`.
        if not any(value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless):
            raise unsupported(name, f"`{name}` is not supported: {hint}.")
