"""Frames of the past, for the slider: segments that begin with a whole frame, compressed, the oldest forgotten."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable

#: Length of a segment: whoever jumps into the past reads one. And what all of them may take; an hour of eight
#: instances under load takes a fifth of it.
SEGMENT_MS, BYTES_MAX = 10_000, 48_000_000


class FrameHistory:
    """Frames of the past, within a bound of bytes."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._closed: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._open: list[bytes] = []
        self._from_ms = self._to_ms = 0

    def keep(self, at_ms: int, changes: bytes, whole: Callable[[int], bytes]) -> None:
        """Keeps a frame; in place of one that begins a segment, a whole one of the same time."""
        if self._open and at_ms - self._from_ms < SEGMENT_MS:
            self._open.append(changes)
        else:
            if self._open:
                packed = zlib.compress(b"\n".join(self._open), 1)
                self._closed[self._from_ms] = (self._to_ms, packed)
                self._bytes += len(packed)
            self._open, self._from_ms = [whole(at_ms)], at_ms
        self._to_ms = at_ms
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._closed.popitem(last=False)[1][1])

    def spans(self) -> list[tuple[int, int]]:
        """From and to of each segment, unix ms."""
        return [(first, to) for first, (to, _) in self._closed.items()] + (
            [(self._from_ms, self._to_ms)] if self._open else []
        )

    def segment(self, from_ms: int) -> bytes | None:
        """Its frames, one a line, in zlib's format; None where there is none."""
        if self._open and from_ms == self._from_ms:
            return zlib.compress(b"\n".join(self._open), 1)
        return self._closed.get(from_ms, (0, None))[1]
