"""JetStream KV in virtual time: revisions, compare-and-set, deletion markers, expiry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millrace.contracts.catalog import BUCKETS

_TTL_NS = {bucket.name: int(bucket.ttl_s * 1e9) for bucket in BUCKETS}


@dataclass(slots=True, eq=False)
class Entry:
    """Last state of a key; a value of None is a deletion marker."""

    value: Any
    revision: int


#: Called with each change: (bucket, key, entry, the one before).
OnChange = Callable[[str, str, Entry, Entry | None], None]

#: Calls back after a delay: (delay_ns, callback, *args).
After = Callable[..., None]


class SimStore:
    """All buckets of the simulated server. Values are opaque."""

    def __init__(self, after: After, on_change: OnChange) -> None:
        self._after = after
        self._on_change = on_change
        self._buckets: dict[str, dict[str, Entry]] = {}
        self._revisions: dict[str, int] = {}

    def wipe(self) -> None:
        """The server lost its disk: no keys, and revisions start over."""
        self._buckets.clear()
        self._revisions.clear()

    def entries(self, bucket: str) -> dict[str, Entry]:
        """Keys with their last state, deletion markers included."""
        return self._buckets.get(bucket, {})

    def write(self, bucket: str, key: str, value: Any, expected: int | None) -> int | None:
        """Puts (or with None deletes) a key; returns the new revision, None for a conflict.

        Args:
            expected: Revision at which the key must stand; 0 where it must not exist (a deletion marker is as good as
                nothing); None for any.
        """
        entry = self._buckets.setdefault(bucket, {}).get(key)
        standing = 0 if entry is None else entry.revision
        absent = entry is None or entry.value is None
        if expected is not None and expected != standing and not (expected == 0 and absent):
            return None
        revision = self._revisions.get(bucket, 0) + 1
        self._revisions[bucket] = revision
        self._set(bucket, key, Entry(value, revision))
        ttl_ns = _TTL_NS.get(bucket, 0)
        if ttl_ns and value is not None:
            self._after(ttl_ns, self._expire, bucket, key, self._buckets[bucket][key])
        return revision

    def _expire(self, bucket: str, key: str, entry: Entry) -> None:
        if self._buckets.get(bucket, {}).get(key) is entry:
            revision = self._revisions[bucket] + 1
            self._revisions[bucket] = revision
            self._set(bucket, key, Entry(None, revision))

    def _set(self, bucket: str, key: str, entry: Entry) -> None:
        before = self._buckets[bucket].get(key)
        self._buckets[bucket][key] = entry
        self._on_change(bucket, key, entry, before)
