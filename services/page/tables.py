"""Tables of rows that tell what of them has changed, and the past of their changes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

#: A row is a flat dict; both sides merge changes into it.
Row = dict[str, Any]

#: Length of a segment, which whoever jumps into the past reads; and bytes of all: five hours of eight busy instances.
SEGMENT_MS, BYTES_MAX = 10_000, 48_000_000


class Tables:
    """Rows by table and key, and what changed since the last ``take``."""

    def __init__(self, *names: str, **bounded: int) -> None:
        """``bounded``: tables that forget their oldest row beyond so many."""
        self.rows: dict[str, dict[str, Row]] = {name: {} for name in (*names, *bounded)}
        self._bounded = bounded
        self._changes: dict[str, dict[str, Row | None]] = {}

    def put(self, table: str, key: str, /, **fields: Any) -> Row:
        """Sets fields of a row, which is made where there is none; returns the row."""
        rows = self.rows[table]
        row = rows.setdefault(key, {})
        if changed := {name: each for name, each in fields.items() if name not in row or row[name] != each}:
            row.update(changed)
            known = self._changes.setdefault(table, {})
            known[key] = (known.get(key) or {}) | changed
        if len(rows) > self._bounded.get(table, len(rows)):
            self.drop(table, next(iter(rows)))
        return row

    def drop(self, table: str, key: str) -> None:
        """Removes a row; unknown ones are no error."""
        if self.rows[table].pop(key, None) is not None:
            self._changes.setdefault(table, {})[key] = None

    def take(self) -> dict[str, dict[str, Row | None]]:
        """By table and key the fields that have changed; None for a row that is gone."""
        changes, self._changes = self._changes, {}
        return changes


class Past:
    """Frames in segments that begin with a whole one, compressed, the oldest forgotten. Times are unix ms."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._closed: dict[int, bytes] = {}
        self._open: list[bytes] = []
        self._from_ms = self._to_ms = 0

    def keep(self, at_ms: int, frame: bytes, whole: Callable[[], bytes]) -> None:
        """Keeps a frame; in place of one that begins a segment, a whole one of the same time."""
        if not self._open or at_ms - self._from_ms >= SEGMENT_MS:
            if self._open:
                self._closed[self._from_ms] = self._packed()
            while sum(map(len, self._closed.values())) > self._bytes_max:
                del self._closed[next(iter(self._closed))]
            self._open, self._from_ms, frame = [], at_ms, whole()
        self._open.append(frame)
        self._to_ms = at_ms

    def spans(self) -> list[tuple[int, int]]:
        """From and to of each segment; each but the last ends where the next one begins."""
        return list(pairwise((*self._closed, self._from_ms, self._to_ms))) if self._open else []

    def segment(self, from_ms: int) -> bytes | None:
        """Its frames, one a line, in zlib's format; None where there is none."""
        return self._packed() if from_ms == self._from_ms else self._closed.get(from_ms)

    def _packed(self) -> bytes:
        return zlib.compress(b"\n".join(self._open), 1)
