"""Parsed requests: a body is parsed and checked, tokenized by the shell, and built into a Call. No I/O.

Tokenizing is a step of its own because a long prompt is tokenized in a thread. Whatever parses or checks raises
ApiError for what the client has to change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from millrace.contracts.worker import PIECES_MAX, Images, Pooling, Sampling, StructuredOutput

from services.ingress.api.answer_forms import AnswerForm
from services.ingress.api.decoding import decode_body
from services.ingress.api.errors import ApiError, bad_value, unsupported
from services.ingress.api.images import image_files, refuse_large
from services.ingress.api.messages import prompt_text, template_values
from services.ingress.api.model_schema_bounds import bounded_output
from services.ingress.api.models import ModelRegistry, ServedModel
from services.ingress.api.requests import (
    CHOICES_MAX,
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    Shared,
)
from services.ingress.api.sampling import prompt_too_long, sampling_of
from services.ingress.api.structured_outputs import structured_output
from services.ingress.api.tools import NO_PARSERS, NO_TOOLS, ToolPlan, plan_tools
from services.ingress.api.unsupported import refuse_of_one_chat
from services.ingress.calls.messages import Call, CallKind, CascadeOptions, KeyLimits
from services.ingress.parsing.messages import ParserOpened

#: Characters of the rendered prompt that the tagger sees.
HEAD_CHARACTERS = 2_048
#: Prompts of one request. Prompts times ``n`` are no more than ``n`` of one prompt may be.
PROMPTS_MAX = 64


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Caller of a request: what the shell knows besides the body; field meanings as in Call."""

    request: str
    key: str = ""
    limits: KeyLimits = KeyLimits()
    traceparent: str = ""
    parent_span_id: str = ""
    client_id: str = ""


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request that still needs token ids.

    Attributes:
        texts: Prompts to tokenise; None where ``token_ids`` were given.
        special: Whether tokenising adds BOS and the like.
        echo: The prompt stands before the output, of a chat its last message.
        opened: What the parser of its output asks of the engine; None where the parser process does not read it.
        members: Of a request to a cascade: the request for each model that can take it, in the order of tiers; the
            request itself is then that of the first one.
        cascade: Name of the cascade; empty for none.
        form: Form of the answer; None for that of the kind.
        begun: Of a call without a client: output tokens that it has from another ingress. None for others.
        pooling: What is pooled in place of a text; None for a text.
        second_from: As in Call.
        image_files: Of its images, before it is tokenised; in place of one that has to be fetched its URL.
        images: The same behind that; None for none.
    """

    kind: CallKind
    request: Shared
    model: ServedModel
    texts: list[str] | None
    token_ids: list[list[int]] | None
    special: bool
    tools: ToolPlan = NO_TOOLS
    echo: bool = False
    opened: ParserOpened | None = None
    members: tuple[ParsedRequest, ...] = ()
    cascade: str = ""
    form: AnswerForm | None = None
    begun: list[int] | None = None
    pooling: Pooling | None = None
    second_from: list[int] = []
    image_files: list[bytes | str] = []
    images: Images | None = None

    @property
    def variants(self) -> tuple[ParsedRequest, ...]:
        """The members, or the request itself."""
        return self.members or (self,)

    @property
    def key(self) -> str:
        """Equal for variants whose prompts are tokenised alike."""
        return self.model.tokenizer.fingerprint or self.model.name


def parse_chat_request(body: bytes, models: ModelRegistry) -> ParsedRequest:
    """Read and check a chat request."""
    request = decode_body(body, ChatRequest)
    check_options(request)
    return for_each_member(request, models, lambda model: parse_chat(request, model))


def parse_chat(request: ChatRequest, model: ServedModel) -> ParsedRequest:
    """The request as one model takes it."""
    template = model.tokenizer.template
    tools = plan_tools(request, template.traits, model.parsers) if template is not None else NO_TOOLS
    given, ids = request.kv_transfer_params, None
    files = image_files(request, model.tokenizer)
    text = prompt_text(request, template)
    if given is not None:
        _, ids = prompts_of(given.prompt_token_ids, model.tokenizer.vocabulary.size)
    return ParsedRequest(
        kind=CallKind.CHAT,
        request=request,
        model=model,
        texts=[text] if ids is None else None,
        token_ids=ids,
        special=bool(request.add_special_tokens),
        tools=tools,
        image_files=files,
        # As vLLM has it: the last message where the answer goes on in its role.
        echo=bool(request.echo)
        and (request.messages[-1].role == "assistant" or request.add_generation_prompt is False),
    )


def parse_batch_request(body: bytes, models: ModelRegistry) -> ParsedRequest:
    """Read and check several chats, which are one call with a prompt each."""
    batch = decode_body(body, BatchRequest)
    refuse_of_one_chat(batch)
    check_options(batch, len(batch.messages), "messages")
    shared = {name: getattr(batch, name) for name in ChatRequest.__struct_fields__}
    chats = [ChatRequest(**shared | {"messages": messages}) for messages in batch.messages]

    def parse(model: ServedModel) -> ParsedRequest:
        parsed = [parse_chat(chat, model) for chat in chats]
        if any(each.image_files for each in parsed):
            raise unsupported("messages", "Images are not supported here: send such a chat alone.")
        return msgspec.structs.replace(parsed[0], texts=[text for each in parsed for text in each.texts or []])

    return for_each_member(batch, models, parse)


def parse_completion_request(body: bytes, models: ModelRegistry) -> ParsedRequest:
    """Read and check a completions request."""
    request = decode_body(body, CompletionRequest)
    prompt = request.prompt
    check_options(request, 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt))
    return for_each_member(request, models, lambda model: _completion(request, model))


def _completion(request: CompletionRequest, model: ServedModel) -> ParsedRequest:
    texts, token_ids = prompts_of(request.prompt, model.tokenizer.vocabulary.size)
    if request.max_tokens == 0 and not request.echo:
        raise bad_value("max_tokens", "`max_tokens` 0 needs `echo`.")
    return ParsedRequest(
        kind=CallKind.COMPLETION,
        request=request,
        model=model,
        texts=texts,
        token_ids=token_ids,
        special=request.add_special_tokens is not False,
        echo=bool(request.echo),
    )


def distinct(parsed: ParsedRequest) -> list[ParsedRequest]:
    """One variant for each tokenizer."""
    return list({each.key: each for each in parsed.variants}.values())


def refuse_hopeless(parsed: ParsedRequest, limit: Callable[[ServedModel], int]) -> None:
    """Refuse what fits no model however it is tokenised, before that costs anything.

    Raises:
        ApiError: 400.
    """
    at_least = 0
    for each in parsed.variants:
        characters = each.model.tokenizer.characters_per_token_max
        at_least = max(map(len, each.texts or [""])) // characters if characters else 0
        if at_least < limit(each.model) or parsed.request.truncate_prompt_tokens is not None:
            return
    raise prompt_too_long(parsed.request, f"the prompt has at least {at_least} tokens", limit(parsed.model))


def build_call(parsed: ParsedRequest, prompts: list[list[int]], caller: Caller, max_model_len: int) -> Call:
    """The finished call.

    Raises:
        ApiError: 400 for what depends on the prompt's length.
    """
    request, opened = parsed.request, parsed.opened
    prompts = [_truncated(request, prompt, max_model_len) for prompt in prompts]
    shortest = min(map(len, prompts))
    if shortest == 0:
        param = "messages" if parsed.kind is CallKind.CHAT else "prompt"
        raise bad_value(param, f"`{param}` gives a prompt of no tokens.")
    asked = _constraint(parsed)
    structured = bounded_output(asked, parsed.model.tokenizer.schema_bounds)
    sampling = _pooled(parsed) or sampling_of(
        request,
        structured=structured,
        prompt_tokens=max(map(len, prompts)),
        max_model_len=max_model_len,
        tokenizer=parsed.model.tokenizer,
        adapter=parsed.model.adapter,
    )
    if parsed.images is not None:
        refuse_large(parsed.images, len(prompts[0]), sampling.max_tokens)
        sampling = msgspec.structs.replace(sampling, images=parsed.images)
    return Call(
        **msgspec.structs.asdict(caller),
        kind=parsed.kind,
        model=parsed.model.name,
        prompts=prompts,
        sampling=sampling,
        n=request.n or 1,
        prompt_head=parsed.texts[0][:HEAD_CHARACTERS] if parsed.texts else "",
        stop=_stops(request),
        include_stop=bool(request.include_stop_str_in_output),
        stream=bool(request.stream),
        skip_special_tokens=request.skip_special_tokens is not False and not (opened and opened.special_tokens),
        tell_tokens=opened is not None or parsed.begun is not None or bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        constraint_param=_constraint_param(parsed, structured),
        begun=parsed.begun or [],
        second_from=parsed.second_from,
    )


def _pooled(parsed: ParsedRequest) -> Sampling | None:
    """Sampling of a request that is pooled: its output has one piece, that of a model that pools tokens some."""
    pooling = parsed.pooling
    if pooling is None:
        return None
    pieces = PIECES_MAX if pooling.task.startswith("token_") else 1
    return Sampling(max_tokens=pieces, cache_salt=parsed.request.cache_salt or "", pooling=pooling)


def _truncated(request: Shared, prompt: list[int], max_model_len: int) -> list[int]:
    """The prompt's last tokens, as vLLM has it for models that generate, or its first: as many as asked for, or as fit
    before the output (-1).
    """
    length = request.truncate_prompt_tokens
    if length is None:
        return prompt
    if length < 0:
        length = max(0, max_model_len - max(1, request.max_tokens or 0))
    elif length >= max_model_len:
        raise bad_value(
            "truncate_prompt_tokens", f"`truncate_prompt_tokens` is {length}, the model takes {max_model_len}."
        )
    first = request.truncation_side == "right"
    return prompt[:length] if first else prompt[max(0, len(prompt) - length) :]


def _constraint(parsed: ParsedRequest) -> StructuredOutput | None:
    opened = parsed.opened
    if opened is None:
        return parsed.tools.structured or structured_output(parsed.request)
    if opened.structural_tag or opened.json_schema:
        made = StructuredOutput(structural_tag=opened.structural_tag or None, json_schema=opened.json_schema or None)
    elif (own := structured_output(parsed.request)) is not None:
        made = own
    else:
        return None
    if opened.reasoning_ended:
        return made
    assert isinstance(parsed.request, ChatRequest)
    values = msgspec.json.encode(template_values(parsed.request)).decode()
    return msgspec.structs.replace(made, after_reasoning=values)


def _constraint_param(parsed: ParsedRequest, structured: StructuredOutput | None) -> str:
    if structured is None:
        return ""
    if parsed.tools.structured is not None or (parsed.opened and parsed.opened.structural_tag):
        return "tools"
    return "structured_outputs" if parsed.request.structured_outputs is not None else "response_format"


def for_each_member(
    request: Shared, models: ModelRegistry, parse: Callable[[ServedModel], ParsedRequest]
) -> ParsedRequest:
    """Parse for the model, or for each model of a cascade; rendering is shared where tokenizer and template are.

    A model that cannot take the request is left out.

    Raises:
        ApiError: no model can take it, or it has fields that need a cascade.
    """
    name = request.model or ""
    members = models.members(name)
    if not members:
        model = models.get(request.model)
        if request.cascade is not None:
            raise bad_value("cascade", f"`cascade` needs a cascade as model; {request.model} is a model.")
        return parse(model)
    parsed: dict[str, ParsedRequest] = {}
    found: list[ParsedRequest] = []
    refusals: list[ApiError] = []
    for each in members:
        # Answers of the models of a cascade are judged and told as text, but for calls that are read here.
        model = msgspec.structs.replace(each, parsers=NO_PARSERS)
        key = model.tokenizer.fingerprint or model.name
        try:
            parsed[key] = msgspec.structs.replace(parsed[key], model=model) if key in parsed else parse(model)
        except ApiError as error:
            refusals.append(error)
        else:
            found.append(parsed[key])
    if not found:
        raise refusals[0]
    if found[0].token_ids is not None and len(parsed) > 1:
        detail = "`prompt` gives token ids, and the models of this cascade have different tokenizers; give text."
        raise bad_value("prompt", detail, "invalid_type")
    return msgspec.structs.replace(found[0], members=tuple(found), cascade=name)


def check_options(request: Shared, prompts: int = 1, param: str = "prompt") -> None:
    """Check the number of prompts, which are in that parameter, and the fields that exclude each other."""
    if prompts > PROMPTS_MAX:
        raise bad_value(param, f"`{param}` has {prompts} prompts, at most {PROMPTS_MAX} are taken.")
    choices = prompts * (request.n or 1)
    if choices > CHOICES_MAX:
        raise bad_value("n", f"{prompts} prompts with `n` {request.n} give {choices} choices, at most {CHOICES_MAX}.")
    wishes = request.cascade or CascadeOptions()
    first, last = wishes.entry_tier, wishes.max_tier
    if first is not None and last is not None and first > last:
        raise bad_value("cascade.entry_tier", f"`cascade.entry_tier` is {first}, above `cascade.max_tier` {last}.")
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "`stream_options` needs `stream` to be true.")


def _stops(request: Shared) -> list[str]:
    stop = request.stop
    return [stop] if isinstance(stop, str) else list(stop or [])


def prompts_of(prompt: Any, vocabulary: int) -> tuple[list[str] | None, list[list[int]] | None]:
    """Prompts as texts, or as token ids.

    Raises:
        ApiError: they are of several kinds, or name a token that the model does not have.
    """
    if isinstance(prompt, str):
        return [prompt], None
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return prompt, None
    if kinds == {int}:
        prompt = [prompt]
    elif kinds != {list}:
        raise bad_value("prompt", "`prompt` mixes strings, token ids and lists; give one kind.", "invalid_type")
    for ids in prompt:
        if max(ids) >= vocabulary:
            raise bad_value("prompt", f"`prompt` names token {max(ids)}; the model has {vocabulary} tokens.")
    return None, prompt
