"""Effects and events between the page's actor and its shell."""

from __future__ import annotations

from millrace.actor.effects import Effect
from millrace.contracts.message import Body


class ShowFrame(Effect, frozen=True, kw_only=True):
    """A frame for viewers: all changes since the last one.

    Attributes:
        at_ms: Its time, unix ms.
        data: JSON, see ``actor.py``.
    """

    at_ms: int
    data: bytes


class OrderGiven(Body, frozen=True, kw_only=True, tag="local.OrderGiven/1"):
    """An operator gave an order through the page.

    Attributes:
        text: What was ordered.
        code: Exit code of the verb; None while it runs.
    """

    text: str
    code: int | None = None
