"""Liveness of services other than instances: ingresses as a worker sees them.

One that is heard again in the same incarnation had only stood still, for want of a core say, and begins anew what was
cancelled: twice its longest silence is excused from then on.
"""

from __future__ import annotations

#: Services remembered of one role; the one that was not heard for the longest time is dropped beyond it.
SERVICES_MAX = 1_024
#: No silence of a longer time is excused, ns.
EXCUSED_NS_MAX = 30_000_000_000


class ServiceLiveness:
    """Newest incarnation and last sign of life of each service of one role.

    Times are unix ns of the observer, never those of a message.
    """

    def __init__(self, *, services_max: int = SERVICES_MAX) -> None:
        self._services_max = services_max
        self._heard_ns: dict[str, int] = {}
        self._silent: set[str] = set()
        self._excused_ns: dict[str, int] = {}  # twice the longest silence after which it was heard again
        self._incarnations: dict[str, int] = {}

    def heard(self, name: str, now_ns: int) -> None:
        before_ns = self._heard_ns.pop(name, now_ns)
        self._heard_ns[name] = now_ns
        self._silent.discard(name)
        self._excused_ns[name] = min(max(2 * (now_ns - before_ns), self._excused_ns.get(name, 0)), EXCUSED_NS_MAX)
        if len(self._heard_ns) > self._services_max:
            oldest = next(iter(self._heard_ns))
            self._silent.discard(oldest)
            for known in (self._heard_ns, self._excused_ns, self._incarnations):
                known.pop(oldest, None)

    def excuse(self, still_ns: int, now_ns: int) -> None:
        """The observer itself heard nobody for so long, as it stood still or had no connection."""
        for name, heard_ns in self._heard_ns.items():
            self._heard_ns[name] = min(now_ns, heard_ns + still_ns)

    def incarnation(self, name: str) -> int:
        """Newest incarnation known; 0 for none."""
        return self._incarnations.get(name, 0)

    def renewed(self, name: str, incarnation: int) -> bool:
        """Note an incarnation; True where it replaces an older one."""
        known = self.incarnation(name)
        if incarnation <= known:
            return False
        self._incarnations[name] = incarnation
        self._excused_ns.pop(name, None)
        return known > 0

    def take_silent(self, now_ns: int, *, silence_ns: int) -> list[str]:
        """Services silent for at least that long, or longer where it is excused; each once until it is heard again."""
        silent = [
            name
            for name, heard_ns in self._heard_ns.items()
            if name not in self._silent and now_ns - heard_ns >= max(silence_ns, self._excused_ns.get(name, 0))
        ]
        self._silent.update(silent)
        return silent
