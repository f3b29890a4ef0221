"""An actor without a state of its own, for what stands in for a service or a client in a simulation or a test."""

from __future__ import annotations

from typing import Any

from millrace.actor.effects import Effect


class StandIn:
    """Base of an actor that adds its name and its handler: no effects at its start, nothing to show or to check."""

    def start(self, now_ns: int) -> list[Effect]:
        """Return no effects."""
        return []

    def snapshot(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def check_invariants(self) -> None:
        """Nothing can contradict itself."""
