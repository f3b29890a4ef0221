"""Forms of answers beside chat's and completions': the APIs that are translated to chat and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.ingress.api.responses import CollectedResponse
from services.ingress.api.streams import EventStream, ResponseHead

#: Gets the last bytes of an answer, and what hands them to the client, now or later.
Keep = Callable[[bytes, Callable[[bytes], None]], None]


def hand_on(last: bytes, tell: Callable[[bytes], None]) -> None:
    """Store nothing."""
    tell(last)


class AnswerForm(Protocol):
    """Form of one request's answer.

    Attributes:
        prefix: Beginning of its id.
        keep: What stores it.
    """

    @property
    def prefix(self) -> str: ...

    @property
    def keep(self) -> Keep: ...

    def stream(self, head: ResponseHead) -> EventStream: ...

    def collected(self, head: ResponseHead) -> CollectedResponse: ...
