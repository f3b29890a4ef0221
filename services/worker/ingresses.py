"""Which ingresses are there: the newest incarnation and the last sign of life of each."""

from __future__ import annotations

#: Ingresses remembered; the one unheard of for the longest time is dropped beyond it.
INGRESSES_MAX = 1_024


class Ingresses:
    """Liveness of ingresses as one worker sees it. Times are unix ns of this worker, never those of a message."""

    def __init__(self) -> None:
        self._seen_ns: dict[str, int] = {}
        self._incarnations: dict[str, int] = {}

    def seen(self, ingress: str, now_ns: int) -> None:
        """Notes a sign of life."""
        self._seen_ns.pop(ingress, None)
        self._seen_ns[ingress] = now_ns
        if len(self._seen_ns) > INGRESSES_MAX:
            oldest = next(iter(self._seen_ns))
            del self._seen_ns[oldest]
            self._incarnations.pop(oldest, None)

    def all_seen(self, now_ns: int) -> None:
        """Starts every silence anew: nobody could be heard while the bus was away."""
        for ingress in self._seen_ns:
            self._seen_ns[ingress] = now_ns

    def incarnation(self, ingress: str) -> int:
        """Newest incarnation known; 0 for none."""
        return self._incarnations.get(ingress, 0)

    def renewed(self, ingress: str, incarnation: int) -> bool:
        """Notes an incarnation; True where it replaces an older one, whose sequences are orphans then."""
        known = self.incarnation(ingress)
        if incarnation <= known:
            return False
        self._incarnations[ingress] = incarnation
        return known > 0

    def take_silent(self, now_ns: int, *, limit_ns: int) -> list[str]:
        """Ingresses silent for at least the limit; they are no longer watched until they are heard again."""
        silent = [name for name, seen_ns in self._seen_ns.items() if now_ns - seen_ns >= limit_ns]
        for name in silent:
            del self._seen_ns[name]
        return silent
