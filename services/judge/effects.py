"""Effects and events between the judge's actor and its shell: questions over HTTP."""

from __future__ import annotations

from millrace.actor.effects import Effect
from millrace.contracts.message import Body


class AskModel(Effect, frozen=True, kw_only=True):
    """Posts chat completions: ModelAnswered or AskingFailed with the same correlation follows, exactly one of them.

    Attributes:
        bodies: JSON of each choice's question; all are asked at once.
    """

    correlation: int
    bodies: list[bytes]


class ModelAnswered(Body, frozen=True, kw_only=True, tag="local.ModelAnswered/1"):
    """Bodies of all answers with status 200, in the order of the questions."""

    correlation: int
    payloads: list[bytes]


class AskingFailed(Body, frozen=True, kw_only=True, tag="local.AskingFailed/1"):
    """One of the questions had no usable answer in time.

    Attributes:
        why: ``timeout``, ``status`` or ``unreachable``.
    """

    correlation: int
    why: str
    detail: str
