"""Forms of answers beside chat's and completions': the APIs that are translated to these and back."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.ingress.api.responses import CollectedResponse
from services.ingress.api.streams import EventStream, ResponseHead, StreamBody, WrittenStream

#: Gets the last bytes of an answer, and what hands them to the client, now or later.
Keep = Callable[[bytes, Callable[[bytes], None]], None]


def hand_on(last: bytes, tell: Callable[[bytes], None]) -> None:
    """Store nothing."""
    tell(last)


class AnswerForm(msgspec.Struct, frozen=True):
    """Form of one request's answer.

    Attributes:
        prefix: Beginning of its id.
        collected: Makes the collector of one that is told whole.
        stream: Makes the writer of its events; None where it is never streamed.
        keep: What stores it.
    """

    prefix: str
    collected: Callable[[ResponseHead], CollectedResponse]
    stream: Callable[[ResponseHead], EventStream] | None = None
    keep: Keep = hand_on


def written_form(prefix: str, stream: Callable[[ResponseHead], WrittenStream], keep: Keep = hand_on) -> AnswerForm:
    """Form of an answer that is told whole by the writer of its events, too."""
    return AnswerForm(prefix, lambda head: StreamBody(stream(head)), stream, keep)
