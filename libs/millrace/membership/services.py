"""Liveness of services other than instances: ingresses as a worker sees them, brokers as a migrator sees them."""

from __future__ import annotations

#: Services remembered of one role; the one that was not heard for the longest time is dropped beyond it.
SERVICES_MAX = 1_024


class ServiceLiveness:
    """Newest incarnation and last sign of life of each service of one role.

    Times are unix ns of the observer, never those of a message.
    """

    def __init__(self, *, services_max: int = SERVICES_MAX) -> None:
        self._services_max = services_max
        self._heard_ns: dict[str, int] = {}
        self._incarnations: dict[str, int] = {}

    def heard(self, name: str, now_ns: int) -> None:
        self._heard_ns.pop(name, None)
        self._heard_ns[name] = now_ns
        if len(self._heard_ns) > self._services_max:
            oldest = next(iter(self._heard_ns))
            del self._heard_ns[oldest]
            self._incarnations.pop(oldest, None)

    def lost(self, name: str) -> None:
        """It left, or its process was seen to end."""
        self._heard_ns.pop(name, None)

    def restart_timers(self, now_ns: int) -> None:
        for name in self._heard_ns:
            self._heard_ns[name] = now_ns

    def incarnation(self, name: str) -> int:
        """Newest incarnation known; 0 for none."""
        return self._incarnations.get(name, 0)

    def renewed(self, name: str, incarnation: int) -> bool:
        """Note an incarnation; True where it replaces an older one."""
        known = self.incarnation(name)
        if incarnation <= known:
            return False
        self._incarnations[name] = incarnation
        return known > 0

    def take_silent(self, now_ns: int, *, silence_ns: int) -> list[str]:
        """Services silent for at least that long; they are not watched until they are heard again."""
        silent = [name for name, heard_ns in self._heard_ns.items() if now_ns - heard_ns >= silence_ns]
        for name in silent:
            del self._heard_ns[name]
        return silent
