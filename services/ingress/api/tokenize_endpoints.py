"""POST /tokenize and /detokenize, in vLLM's shapes. Both raise ApiError for what the client has to change."""

from __future__ import annotations

from typing import Any

import msgspec

from services.ingress.api.decoding import decode_body
from services.ingress.api.errors import bad_value
from services.ingress.api.messages import prompt_text
from services.ingress.api.models import ModelRegistry
from services.ingress.api.requests import DetokenizeRequest, TokenizeRequest

_encode = msgspec.json.Encoder().encode


def tokenize(body: bytes, models: ModelRegistry) -> bytes:
    """Token ids of a prompt or of rendered messages."""
    request = decode_body(body, TokenizeRequest)
    model = models.get(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_value("prompt", "Give `prompt` or `messages`, one of them.")
    if request.messages is not None:
        ids = model.tokenizer.encode(
            prompt_text(request, model.tokenizer.template), special=bool(request.add_special_tokens)
        )
    else:
        assert request.prompt is not None
        ids = model.tokenizer.encode(request.prompt, special=request.add_special_tokens is not False)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": models.limit(model), "tokens": ids}
    answer["token_strs"] = [model.tokenizer.token_string(i) for i in ids] if request.return_token_strs else None
    return _encode(answer)


def tokenizer_info(models: ModelRegistry) -> bytes:
    """The tokenizer's settings, from the folder of the one model.

    Raises:
        ApiError: 400 where there are several models.
    """
    return _encode(models.get(None).tokenizer.settings)


def detokenize(body: bytes, models: ModelRegistry) -> bytes:
    """Text of token ids."""
    request = decode_body(body, DetokenizeRequest)
    model = models.get(request.model)
    size = model.tokenizer.vocabulary.size
    if request.tokens and max(request.tokens) >= size:
        raise bad_value("tokens", f"`tokens` names token {max(request.tokens)}; the model has {size} tokens.")
    return _encode({"prompt": model.tokenizer.decode(request.tokens)})
