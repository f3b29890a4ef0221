"""Requests to cascades: one Call with the request as each model takes it. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from services.ingress.api.errors import ApiError
from services.ingress.api.models import ServedModel
from services.ingress.api.parsed_requests import Caller, ParsedRequest, build_call
from services.ingress.calls.messages import Call, CascadeOptions

#: Bytes of the rendered prompt that judges get; its end is kept.
JUDGED_PROMPT_BYTES_MAX = 65_536


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
    members: list[Call] = []
    refusals: list[ApiError] = []
    for member, ids in zip(parsed.members, prompts, strict=True):
        try:
            call = build_call(member, ids, caller, limit(member.model))
        except ApiError as error:
            refusals.append(error)
        else:
            texts = member.texts or []
            prompt = _end_of(texts[0]) if len(texts) == 1 else ""
            members.append(msgspec.structs.replace(call, judged_prompt=prompt))
    if not members:
        raise refusals[-1]
    options = parsed.request.cascade or CascadeOptions()
    return msgspec.structs.replace(members[0], model=parsed.cascade, members=members, cascade=options)


def _end_of(text: str) -> str:
    if len(text) * 4 <= JUDGED_PROMPT_BYTES_MAX:
        return text
    return text.encode("utf-8", "replace")[-JUDGED_PROMPT_BYTES_MAX:].decode("utf-8", "ignore")
