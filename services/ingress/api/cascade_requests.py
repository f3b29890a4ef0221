"""Requests to cascades: one Call with the request as each model takes it. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from services.ingress.api.errors import ApiError
from services.ingress.api.models import ServedModel
from services.ingress.api.parsed_requests import Caller, ParsedRequest, build_call, refuse_hopeless
from services.ingress.calls.messages import Call, CascadeOptions, MemberCall

G = TypeVar("G")
M = TypeVar("M")

#: Bytes of the rendered prompt that judges get; its end is kept.
JUDGED_PROMPT_BYTES_MAX = 65_536


def able_variants(parsed: ParsedRequest, limit: Callable[[ServedModel], int]) -> ParsedRequest:
    """The request without the models that its prompt cannot fit, however it is tokenised.

    Raises:
        ApiError: 400 where it fits none.
    """
    if not parsed.members:
        refuse_hopeless(parsed, limit(parsed.model))
        return parsed
    able = _of_able(parsed.members, lambda member: refuse_hopeless(member, limit(member.model)))
    return msgspec.structs.replace(parsed, members=tuple(member for member, _ in able))


def build_any_call(
    parsed: ParsedRequest, prompts: Sequence[list[list[int]]], caller: Caller, limit: Callable[[ServedModel], int]
) -> Call:
    """The finished call.

    Args:
        prompts: Token ids for each variant of the request.
        limit: Length bound of a model now, tokens.

    Raises:
        ApiError: 400 where no model can take it.
    """
    if not parsed.members:
        return build_call(parsed, prompts[0], caller, limit(parsed.model))
    able = _of_able(
        zip(parsed.members, prompts, strict=True), lambda each: build_call(*each, caller, limit(each[0].model))
    )
    members = [_member(member, call) for (member, _), call in able]
    options = parsed.request.cascade or CascadeOptions()
    return msgspec.structs.replace(able[0][1], model=parsed.cascade, members=members, cascade=options)


def _of_able(given: Iterable[G], make: Callable[[G], M]) -> list[tuple[G, M]]:
    """Pairs of a given thing and what is made of it, where it can be. Raises the last ApiError where none can be."""
    made, refusals = [], []
    for each in given:
        try:
            made.append((each, make(each)))
        except ApiError as error:
            refusals.append(error)
    if not made:
        raise refusals[-1]
    return made


def _member(parsed: ParsedRequest, call: Call) -> MemberCall:
    texts = parsed.texts or []
    return MemberCall(
        model=parsed.model.name,
        prompts=call.prompts,
        sampling=call.sampling,
        prompt_head=call.prompt_head,
        prompt=_end_of(texts[0]) if len(texts) == 1 else "",
    )


def _end_of(text: str) -> str:
    if len(text) * 4 <= JUDGED_PROMPT_BYTES_MAX:
        return text
    return text.encode("utf-8", "replace")[-JUDGED_PROMPT_BYTES_MAX:].decode("utf-8", "ignore")
