"""Effects and events between the page's actor and its shell."""

from __future__ import annotations

from millrace.actor.effects import Effect
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrationFinished
from millrace.contracts.observers import DecisionMade, RequestFinished


class ShowFrame(Effect, frozen=True, kw_only=True):
    """A frame for viewers.

    Attributes:
        at_ms: Its time, unix ms.
        data: JSON, see ``actor.py``.
        whole: It holds every row; else what changed since the last frame.
    """

    at_ms: int
    data: bytes
    whole: bool


class TellRequest(Effect, frozen=True, kw_only=True):
    """Answers RequestAsked.

    Attributes:
        told: Time at which it was heard, unix ns, and the message; in order of arrival. Empty for an unknown request.
    """

    correlation: int
    told: list[tuple[int, DecisionMade | MigrationFinished | RequestFinished]]


class FrameWanted(Body, frozen=True, kw_only=True, tag="local.FrameWanted/1"):
    """A whole frame is wanted: somebody has come, or has fallen behind."""


class ViewersCounted(Body, frozen=True, kw_only=True, tag="local.ViewersCounted/1"):
    """So many look on: with nobody there frames are fewer."""

    count: int


class RequestAsked(Body, frozen=True, kw_only=True, tag="local.RequestAsked/1"):
    """Asks what is known of a request, or of the request of a sequence."""

    request: str
    correlation: int


class OrderGiven(Body, frozen=True, kw_only=True, tag="local.OrderGiven/1"):
    """An operator gave an order through the page.

    Attributes:
        text: What was ordered.
        code: Exit code of the verb; None while it runs.
    """

    text: str
    code: int | None = None
