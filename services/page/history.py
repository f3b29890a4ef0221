"""Frames of a run, for the slider: segments that begin with a whole frame, compressed, the oldest forgotten."""

from __future__ import annotations

import zlib
from collections import OrderedDict

from services.page.actor import PageActor
from services.page.effects import ShowFrame

#: Length of a segment: whoever jumps into the past reads one. And what all of them may take; an hour of eight
#: instances under load takes a fifth of it.
SEGMENT_MS, BYTES_MAX = 10_000, 48_000_000


class PageRun:
    """One run that can be shown: the live cluster's, a simulation's, or a recording's.

    Attributes:
        name: What viewers call it.
        actor: Knows its last state, and its requests.
        at_ms: Time of its last frame, unix ms.
    """

    def __init__(self, name: str, actor: PageActor, bytes_max: int = BYTES_MAX) -> None:
        """``bytes_max``: of what is kept."""
        self.name = name
        self.actor = actor
        self.at_ms = actor.incarnation // 1_000_000
        self._bytes_max = bytes_max
        self._bytes = 0
        self._closed: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._open: list[bytes] = []
        self._from_ms = 0

    def keep(self, frame: ShowFrame) -> None:
        """Keeps a frame; in place of one that begins a segment, a whole one of the same time."""
        if self._open and frame.at_ms - self._from_ms < SEGMENT_MS:
            self._open.append(frame.data)
        else:
            if self._open:
                packed = zlib.compress(b"\n".join(self._open), 1)
                self._closed[self._from_ms] = (self.at_ms, packed)
                self._bytes += len(packed)
            self._open, self._from_ms = [self.actor.whole(frame.at_ms)], frame.at_ms
        self.at_ms = frame.at_ms
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._closed.popitem(last=False)[1][1])

    def spans(self) -> list[tuple[int, int]]:
        """From and to of each segment, unix ms."""
        closed = [(first, to) for first, (to, _) in self._closed.items()]
        return [*closed, (self._from_ms, self.at_ms)] if self._open else closed

    def segment(self, from_ms: int) -> bytes | None:
        """Its frames, one a line, in zlib's format; None where there is none."""
        if self._open and from_ms == self._from_ms:
            return zlib.compress(b"\n".join(self._open), 1)
        return self._closed.get(from_ms, (0, None))[1]
