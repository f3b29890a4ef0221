"""Forms of answers beside chat's and completions': the APIs that are translated to chat and back."""

from __future__ import annotations

from typing import Protocol

from services.ingress.api.responses import CollectedResponse
from services.ingress.api.streams import EventStream, ResponseHead


class AnswerForm(Protocol):
    """Form of one request's answer.

    Attributes:
        prefix: Beginning of its id.
    """

    @property
    def prefix(self) -> str: ...

    def stream(self, head: ResponseHead) -> EventStream:
        """Writer of its events."""
        ...

    def collected(self, head: ResponseHead) -> CollectedResponse:
        """Writer of its body."""
        ...
