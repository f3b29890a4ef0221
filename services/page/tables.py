"""Tables of rows that tell what of them has changed. A row is a flat dict; both sides merge changes into it."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
#: By table and key: the changed fields of a row, or None for a row that is gone.
Changes = dict[str, dict[str, Row | None]]


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
