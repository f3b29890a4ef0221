"""Request fields to Sampling: defaults as vLLM has them, and the checks that need more than one field."""

from __future__ import annotations

import re

from millrace.contracts.worker import Adapter, Sampling, StructuredOutput

from services.ingress.api.errors import ApiError, bad_value
from services.ingress.api.requests import INT64_MAX, PROMPT_LOGPROBS_MAX, ChatRequest, CompletionRequest, Shared
from services.ingress.api.tokenizer import ModelTokenizer

#: vLLM's and OpenAI's default of the completions endpoint.
COMPLETION_TOKENS_DEFAULT = 16
_TOKEN_ID = re.compile("[0-9]{1,10}")
#: Fields that engines have under the same name.
_SAME = (
    "temperature", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "ignore_eos", "cache_salt",
)  # fmt: skip


def sampling_of(
    request: Shared,
    *,
    structured: StructuredOutput | None,
    prompt_tokens: int,
    max_model_len: int,
    tokenizer: ModelTokenizer,
    adapter: Adapter | None = None,
) -> Sampling:
    """Sampling of a request's tokens.

    Args:
        prompt_tokens: Length of its longest prompt.
        max_model_len: Prompt plus output bound of the model, tokens.

    Raises:
        ApiError: 400 for fields that contradict each other or the model.
    """
    max_tokens = output_bound(request, prompt_tokens=prompt_tokens, max_model_len=max_model_len)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_value("min_tokens", f"`min_tokens` is {min_tokens}, more than the {max_tokens} tokens allowed.")
    if request.seed is not None and request.seed + (request.n or 1) - 1 > INT64_MAX:
        raise bad_value("seed", "`seed` is too large: choice c is drawn with `seed` + c, which has to fit 64 bits.")
    top_k, budget, vocabulary = request.top_k or 0, request.thinking_token_budget, tokenizer.vocabulary.size
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        **{name: value for name in _SAME if (value := getattr(request, name)) is not None},
        top_k=0 if top_k == -1 else top_k,
        logit_bias=_bias(request, vocabulary),
        logprobs=_logprobs(request),
        stop_token_ids=_known("stop_token_ids", request.stop_token_ids or [], vocabulary),
        allowed_token_ids=_known("allowed_token_ids", request.allowed_token_ids or [], vocabulary) or None,
        bad_words=[run for word in request.bad_words or [] for run in _bad_word(word, tokenizer)],
        prompt_logprobs=_prompt_logprobs(request, prompt_tokens),
        thinking_token_budget=None if budget == -1 else budget,
        structured=structured,
        adapter=adapter,
    )


def output_bound(request: Shared, *, prompt_tokens: int, max_model_len: int) -> int:
    """Output tokens at most: what the client says, else what remains of the model's length (chat) or 16.

    Raises:
        ApiError: 400 where prompt, or prompt and output together, do not fit.
    """
    chat = isinstance(request, ChatRequest)
    room = max_model_len - prompt_tokens
    if room < 1:
        raise prompt_too_long(request, f"the prompt has {prompt_tokens} tokens", max_model_len)
    param, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if asked not in (None, request.max_completion_tokens):
            raise bad_value("max_tokens", "`max_tokens` and `max_completion_tokens` differ; give one of them.")
        param, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is None:
        return room if chat else min(room, COMPLETION_TOKENS_DEFAULT)
    if asked == 0:  # with `echo`: vLLM decodes one token, too, and leaves it out
        return 1
    if asked > room:
        detail = f"the prompt has {prompt_tokens} tokens and `{param}` asks for {asked} more"
        raise _too_long(param, detail, max_model_len)
    return asked


def prompt_too_long(request: Shared, detail: str, max_model_len: int) -> ApiError:
    """400: the prompt alone does not fit."""
    return _too_long("messages" if isinstance(request, ChatRequest) else "prompt", detail, max_model_len)


def _too_long(param: str, detail: str, max_model_len: int) -> ApiError:
    message = f"This model's maximum context length is {max_model_len} tokens, but {detail}."
    return bad_value(param, message, "context_length_exceeded")


def _bias(request: Shared, vocabulary: int) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    wrong = [key[:100] for key in request.logit_bias if not _TOKEN_ID.fullmatch(key)]
    if wrong:
        raise bad_value("logit_bias", f"Invalid value for `logit_bias`: {', '.join(wrong[:10])} are no token ids.")
    bias = {int(token): value for token, value in request.logit_bias.items()}
    for token in bias:
        if token >= vocabulary:
            raise bad_value("logit_bias", f"`logit_bias` names token {token}; the model has {vocabulary} tokens.")
    return bias


def _known(name: str, ids: list[int], vocabulary: int) -> list[int]:
    for token in ids:
        if token >= vocabulary:
            raise bad_value(name, f"`{name}` names token {token}; the model has {vocabulary} tokens.")
    return ids


def _bad_word(word: str, tokenizer: ModelTokenizer) -> list[list[int]]:
    """Token ids of a word at the beginning of a text and, where they differ in the first of as many, behind a blank."""
    plain = tokenizer.encode(word.lstrip(), special=False)
    if not plain:
        raise bad_value("bad_words", "`bad_words` has a word without a token.")
    inside = tokenizer.encode(" " + word.lstrip(), special=False)
    return [plain, inside] if inside[0] != plain[0] and len(inside) == len(plain) else [plain]


def _prompt_logprobs(request: Shared, prompt_tokens: int) -> int | None:
    count = request.prompt_logprobs
    if count is not None and request.stream:
        raise bad_value("prompt_logprobs", "`prompt_logprobs` are not told in a stream.")
    if count is None and isinstance(request, CompletionRequest) and request.echo:
        count = request.logprobs
    if count is not None and prompt_tokens * (count + 1) > PROMPT_LOGPROBS_MAX:
        most = PROMPT_LOGPROBS_MAX // (count + 1)
        raise bad_value("prompt_logprobs", f"With {count} alternatives a prompt may have {most} tokens.")
    return count


def _logprobs(request: Shared) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if not request.logprobs:
        if request.top_logprobs:
            raise bad_value("top_logprobs", "`top_logprobs` needs `logprobs` to be true.")
        return None
    return request.top_logprobs or 0
