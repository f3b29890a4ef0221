"""Loads of instances as a broker process keeps them, and those of a large set that are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

from millrace.contracts.broker import LoadReported
from millrace.contracts.status import InstanceRecord
from millrace.policies.trading import LoadView

_MS = 1_000_000

#: Instances of a set that are looked at; of a larger set so many, others every second. Every tick looks at peers, so
#: that a stage of a thousand would otherwise be a million looks. Twelve are drawn to ask six; and where loads vary by
#: 40 percent a mean over 16 is within 10 percent of theirs, while trading begins at 25.
LOOKED_AT = 16


class HeardLoad(NamedTuple):
    """A load, when it was heard, and as policies see it."""

    at_ns: int
    told: LoadReported
    view: LoadView


class TradeCandidate(NamedTuple):
    """An instance that can take something, and until when that holds if nothing else is heard."""

    record: InstanceRecord
    view: LoadView
    until_ns: int


def sampled(names: list[str], instance: str, now_ns: int) -> Iterator[list[str]]:
    """A set, or parts of a large one: each instance begins elsewhere, and with another part each second.

    All parts together are the set, so that who looks on finds the only one with room.
    """
    if len(names) <= LOOKED_AT:
        yield names
        return
    first = (crc32(instance.encode()) + LOOKED_AT * (now_ns // (1_000 * _MS))) % len(names)
    turned = names[first:] + names[:first]
    for at in range(0, len(turned), LOOKED_AT):
        yield turned[at : at + LOOKED_AT]
