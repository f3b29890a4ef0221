"""Tables of rows that tell what of them has changed, and the past of their changes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

#: A row is a flat dict; both sides merge changes into it.
Row = dict[str, Any]
#: By table and key: the changed fields of a row, or None for a row that is gone.
Changes = dict[str, dict[str, Row | None]]

#: Length of a segment: whoever jumps into the past reads one. And what all of them may take; an hour of eight
#: instances under load takes a fifth of it.
SEGMENT_MS, BYTES_MAX = 10_000, 48_000_000


class Tables:
    """Rows by table and key, and what changed since the last ``take``."""

    def __init__(self, *names: str) -> None:
        self.rows: dict[str, dict[str, Row]] = {name: {} for name in names}
        self._changes: Changes = {}

    def put(self, table: str, key: str, /, **fields: Any) -> Row:
        """Sets fields of a row, which is made where there is none; returns the row."""
        row = self.rows[table].get(key)
        changed = fields if row is None else {name: each for name, each in fields.items() if row.get(name) != each}
        if row is None:
            row = self.rows[table][key] = {}
        if changed or not row:
            row.update(changed)
            known = self._changes.setdefault(table, {})
            known[key] = (known.get(key) or {}) | changed
        return row

    def drop(self, table: str, key: str) -> None:
        """Removes a row; unknown ones are no error."""
        if self.rows[table].pop(key, None) is not None:
            self._changes.setdefault(table, {})[key] = None

    def trim(self, table: str, rows_max: int) -> None:
        while len(self.rows[table]) > rows_max:
            self.drop(table, next(iter(self.rows[table])))

    def take(self) -> Changes:
        changes, self._changes = self._changes, {}
        return changes


class Past:
    """Frames in segments that begin with a whole one, compressed, the oldest forgotten. Times are unix ms."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._closed: dict[int, tuple[int, bytes]] = {}
        self._open: list[bytes] = []
        self._from_ms = self._to_ms = 0

    def keep(self, at_ms: int, frame: bytes, whole: Callable[[], bytes]) -> None:
        """Keeps a frame; in place of one that begins a segment, a whole one of the same time."""
        if not self._open or at_ms - self._from_ms >= SEGMENT_MS:
            if self._open:
                self._closed[self._from_ms] = (self._to_ms, self._packed())
            while sum(len(packed) for _, packed in self._closed.values()) > self._bytes_max:
                del self._closed[next(iter(self._closed))]
            self._open, self._from_ms, frame = [], at_ms, whole()
        self._open.append(frame)
        self._to_ms = at_ms

    def spans(self) -> list[tuple[int, int]]:
        """From and to of each segment."""
        closed = [(first, to) for first, (to, _) in self._closed.items()]
        return [*closed, (self._from_ms, self._to_ms)] if self._open else closed

    def segment(self, from_ms: int) -> bytes | None:
        """Its frames, one a line, in zlib's format; None where there is none."""
        return self._packed() if from_ms == self._from_ms else self._closed.get(from_ms, (0, None))[1]

    def _packed(self) -> bytes:
        return zlib.compress(b"\n".join(self._open), 1)
