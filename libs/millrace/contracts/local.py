"""Messages that never cross the bus but reach an actor in the same envelope: timers, replies, KV changes, bus state.

They are Structs with tags too, so that a recorded inbox is complete and can be replayed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from millrace.contracts.message import Body


class TimerFired(Body, frozen=True, kw_only=True, tag="local.TimerFired/1"):
    """The timer started under this name is due.

    Attributes:
        at_ns: The time for which it was started; 0 where it is now.
    """

    name: str
    at_ns: int = 0


class Replied(Body, frozen=True, kw_only=True, tag="local.Replied/1"):
    """The answer to a Request effect; ``body`` may be an ErrorReply."""

    correlation: str
    body: Any


class RequestFailure(StrEnum):
    """Reason why a request has no answer."""

    TIMEOUT = "timeout"
    NO_RESPONDERS = "no_responders"
    DISCONNECTED = "disconnected"
    MALFORMED = "malformed"  # an answer came that could not be read


class RequestFailed(Body, frozen=True, kw_only=True, tag="local.RequestFailed/1"):
    """A Request effect ended without an answer."""

    correlation: str
    reason: RequestFailure


class Gathered(Body, frozen=True, kw_only=True, tag="local.Gathered/1"):
    """Answers that a Gather effect had by its deadline: pairs of (sender, body), in order of arrival. May be empty."""

    correlation: str
    answers: list[tuple[str, Any]]


class AskedTogether(Body, frozen=True, kw_only=True, tag="local.AskedTogether/1"):
    """A Gather's question to one actor of the same process, which answers for all these subjects, in their order."""

    body: Any
    subjects: tuple[str, ...]


class AnsweredTogether(Body, frozen=True, kw_only=True, tag="local.AnsweredTogether/1"):
    """The answers to `AskedTogether`."""

    bodies: list[Any]


class KeyChanged(Body, frozen=True, kw_only=True, tag="local.KeyChanged/1"):
    """A watched key has a new value; None when it was deleted."""

    bucket: str
    key: str
    value: Any
    revision: int


class KeyUnreadable(Body, frozen=True, kw_only=True, tag="local.KeyUnreadable/1"):
    """A watched key has a value that is none. What was told of it before still holds; its owner writes it anew."""

    bucket: str
    key: str
    revision: int


class BucketReady(Body, frozen=True, kw_only=True, tag="local.BucketReady/1"):
    """Every key that existed when the watch began has been reported.

    After BusReconnected each watch begins anew: keys are told again (those that are gone as deleted), then this.
    """

    bucket: str


class KeyPut(Body, frozen=True, kw_only=True, tag="local.KeyPut/1"):
    """A PutKey or DeleteKey effect was carried out."""

    correlation: str
    revision: int


class KeyFailure(StrEnum):
    """Reason why a key was not written."""

    CONFLICT = "conflict"  # the expected revision is not the current one
    UNAVAILABLE = "unavailable"  # the store did not answer in time


class KeyNotPut(Body, frozen=True, kw_only=True, tag="local.KeyNotPut/1"):
    """A PutKey or DeleteKey effect was not carried out (or, with UNAVAILABLE, perhaps was)."""

    correlation: str
    reason: KeyFailure


class BusDisconnected(Body, frozen=True, kw_only=True, tag="local.BusDisconnected/1"):
    """The bus is out of reach; effects on it fail or are dropped until BusReconnected."""


class BusReconnected(Body, frozen=True, kw_only=True, tag="local.BusReconnected/1"):
    """The bus is back; subscriptions and watches are restored. Messages in between are lost."""


class StopRequested(Body, frozen=True, kw_only=True, tag="local.StopRequested/1"):
    """The process was asked to end (SIGTERM). The actor answers, at once or later, with a Stop effect.

    Attributes:
        orphaned: What kept the process running is gone, and the rest of the cluster with it: there is nothing to drain
            for.
        replaced: Another process has its place already: whoever drains may take the time that it needs.
    """

    orphaned: bool = False
    replaced: bool = False
