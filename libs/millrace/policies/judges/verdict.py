"""Input and output of a judge, and the part of a chat completion that judges read."""

from __future__ import annotations

from typing import Any

import msgspec


class Judged(msgspec.Struct, frozen=True):
    """One choice of an answer.

    Attributes:
        model: Who answered.
        prompt: The rendered prompt.
    """

    model: str
    prompt: str
    text: str


class Verdict(msgspec.Struct, frozen=True):
    """A score, or why there is none.

    Attributes:
        score: 0 to 100; None where the judge cannot tell.
    """

    score: float | None
    reason: str = ""


class _Content(msgspec.Struct):
    content: str | None = None


class JudgeChoice(msgspec.Struct):
    """One choice. ``logprobs`` is left as it came: servers differ in it."""

    message: _Content
    logprobs: Any = None


class _Completion(msgspec.Struct):
    choices: list[JudgeChoice]


def first_choice(payload: bytes) -> JudgeChoice | None:
    """The first choice of a chat completion; None for anything else."""
    try:
        told = msgspec.json.decode(payload, type=_Completion)
    except (msgspec.DecodeError, RecursionError):
        return None
    return told.choices[0] if told.choices else None
