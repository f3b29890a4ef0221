"""Requests to models that pool: read, checked and tokenised; they go on as completions whose output is pooled.

Whatever reads or checks raises ApiError for what the client has to change.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from millrace.contracts.worker import Pooling

from services.ingress.api.answer_forms import AnswerForm
from services.ingress.api.decoding import decode_body
from services.ingress.api.errors import bad_value
from services.ingress.api.messages import prompt_text
from services.ingress.api.models import ModelRegistry, ServedModel
from services.ingress.api.parsed_requests import ParsedRequest, prompts_of
from services.ingress.api.pooling_api.answers import classes, pooled_form, ranking, score_list, vectors
from services.ingress.api.pooling_api.requests import (
    TEXTS_MAX,
    ClassificationRequest,
    EmbeddingRequest,
    InputRequest,
    PooledRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    Texts,
)
from services.ingress.api.requests import CompletionRequest, TokenizeRequest
from services.ingress.calls.messages import CallKind

#: vLLM's names of the two sides of a score.
_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))

#: A text, or a pair of texts in one prompt.
Text = str | tuple[str, str]


class PooledCall(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request that still has to be tokenised.

    Attributes:
        texts: Prompts; None where ``token_ids`` were given.
        special: Whether tokenising adds what the model's tokenizer puts around a text.
        limit: Length bound of the model, tokens.
    """

    request: PooledRequest
    model: ServedModel
    pooling: Pooling
    form: AnswerForm
    texts: list[Text] | None
    token_ids: list[list[int]] | None = None
    special: bool = True
    limit: int

    @property
    def characters(self) -> int:
        """Of all texts."""
        return sum(len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in self.texts or [])

    def tokenised(self) -> ParsedRequest:
        """The request as a completion.

        Raises:
            ApiError: 400 for a prompt that is empty or too long.
        """
        request, tokenizer = self.request, self.model.tokenizer
        length = self.limit if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens
        if length is not None and length > self.limit:
            detail = f"`truncate_prompt_tokens` is {length}, the model takes {self.limit}."
            raise bad_value("truncate_prompt_tokens", detail)
        side = request.truncation_side or tokenizer.settings.get("truncation_side", "right")
        if self.texts is None:
            ids = [_cut(each, length, side) for each in self.token_ids or []]
            seconds: list[int] = []
        else:
            found = [
                tokenizer.encode_within(text, special=self.special, length=length, side=side) for text in self.texts
            ]
            ids, seconds = [each for each, _ in found], [second for _, second in found]
        longest = max(map(len, ids))
        if longest > self.limit:
            detail = f"This model's maximum context length is {self.limit} tokens, but the prompt has {longest} tokens."
            raise bad_value("prompt", detail, "context_length_exceeded")
        paired = self.texts is not None and isinstance(self.texts[0], tuple)
        return ParsedRequest(
            kind=CallKind.COMPLETION,
            request=CompletionRequest(prompt=[*ids], model=request.model, cache_salt=request.cache_salt),
            model=self.model,
            texts=None,
            token_ids=ids,
            special=False,
            form=self.form,
            pooling=self.pooling,
            second_from=seconds if paired and tokenizer.token_types else [],
        )


def _cut(ids: list[int], length: int | None, side: str) -> list[int]:
    if length is None:
        return ids
    return ids[max(0, len(ids) - length) :] if side == "left" else ids[:length]


def _call(
    request: PooledRequest, models: ModelRegistry, texts: list[Text], pooling: Pooling, form: AnswerForm
) -> PooledCall:
    model = models.get(request.model)
    return PooledCall(request=request, model=model, pooling=pooling, form=form, texts=texts, limit=models.limit(model))


def _of_input(
    request: InputRequest, models: ModelRegistry, pooling: Pooling, form: Callable[[ServedModel], AnswerForm]
) -> PooledCall:
    """Texts, token ids or a chat."""
    model = models.get(request.model)
    call = _call(request, models, [], pooling, form(model))
    if (request.input is None) == (request.messages is None):
        raise bad_value("input", "Give `input` or `messages`, one of them.")
    if request.messages is not None:
        chat = TokenizeRequest(
            messages=request.messages,
            add_generation_prompt=bool(request.add_generation_prompt),
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        text = prompt_text(chat, model.tokenizer.template)
        return msgspec.structs.replace(call, texts=[text], special=bool(request.add_special_tokens))
    texts, ids = prompts_of(request.input, model.tokenizer.vocabulary.size)
    if len(texts or ids or []) > TEXTS_MAX:
        raise bad_value("prompt", f"`prompt` has {len(texts or ids or [])} texts, at most {TEXTS_MAX} are taken.")
    return msgspec.structs.replace(call, texts=texts, token_ids=ids, special=request.add_special_tokens is not False)


def parse_embeddings(body: bytes, models: ModelRegistry) -> PooledCall:
    """POST /v1/embeddings."""
    return _vectors(decode_body(body, EmbeddingRequest), models, "embed", ("embd-", "embedding", "embedding"))


def parse_pooling(body: bytes, models: ModelRegistry) -> PooledCall:
    """POST /pooling."""
    request = decode_body(body, PoolingRequest)
    task = request.task or models.task(models.get(request.model).name)
    return _vectors(request, models, task, ("pool-", "pooling", "data"))


def _vectors(request: EmbeddingRequest, models: ModelRegistry, task: str, words: tuple[str, str, str]) -> PooledCall:
    """``words``: begin of the answer's id, and its names of an entry and of what is in it."""
    prefix, *names = words
    pooling = Pooling(task=task, dimensions=request.dimensions, use_activation=request.use_activation)
    shape = vectors(*names, base64=request.encoding_format == "base64")
    return _of_input(request, models, pooling, lambda _: pooled_form(prefix, shape))


def parse_classification(body: bytes, models: ModelRegistry) -> PooledCall:
    """POST /classify."""
    request = decode_body(body, ClassificationRequest)
    pooling = Pooling(task="classify", use_activation=request.use_activation)
    return _of_input(request, models, pooling, lambda model: pooled_form("classify-", classes(model.tokenizer.labels)))


def parse_score(body: bytes, models: ModelRegistry) -> PooledCall:
    """POST /score."""
    request = decode_body(body, ScoreRequest)
    given = {name for sides in _SIDES for name in sides if getattr(request, name) is not None}
    sides = next((sides for sides in _SIDES if given == set(sides)), None)
    if sides is None:
        raise bad_value("queries", f"Give two of these: {', or '.join(f'`{a}` and `{b}`' for a, b in _SIDES)}.")
    queries, documents = (_listed(getattr(request, side)) for side in sides)
    if len(queries) not in (1, len(documents)):
        detail = f"`{sides[0]}` has {len(queries)} texts and `{sides[1]}` {len(documents)}: give one, or as many."
        raise bad_value(sides[0], detail)
    return _of_pairs(request, models, queries, documents, lambda asked: pooled_form("score-", score_list(asked)))


def parse_rerank(body: bytes, models: ModelRegistry) -> PooledCall:
    """POST /rerank."""
    request = decode_body(body, RerankRequest)
    documents = _listed(request.documents)
    return _of_pairs(
        request,
        models,
        [request.query],
        documents,
        lambda asked: pooled_form("rerank-", ranking(asked, documents, request.top_n or 0)),
    )


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _of_pairs(
    request: PooledRequest,
    models: ModelRegistry,
    queries: list[str],
    documents: list[str],
    form: Callable[[int], AnswerForm],
) -> PooledCall:
    """Queries and documents: a prompt for each text where the model embeds, for each pair where it classifies.

    Args:
        form: From the number of prompts that are queries (0 where prompts are pairs) to the form of the answer.

    Raises:
        ApiError: 400 for a classifier of more than one class.
    """
    model = models.get(request.model)
    task = models.task(model.name) or "embed"
    pooling = Pooling(task=task, use_activation=request.use_activation)
    if task != "classify":
        return _call(request, models, [*queries, *documents], pooling, form(len(queries)))
    if (classes := len(model.tokenizer.labels)) != 1:
        raise bad_value("model", f"Only a classifier with one class scores; {model.name} has {classes}.")
    pairs = list(zip(queries * (len(documents) if len(queries) == 1 else 1), documents, strict=True))
    texts: list[Text] = list(pairs) if model.tokenizer.pairs_apart else [query + text for query, text in pairs]
    return _call(request, models, texts, pooling, form(0))
