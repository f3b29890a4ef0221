"""Settings of central ARES in a scenario."""

from __future__ import annotations

import msgspec
from millrace.policies.rescheduling.ares.policy import Parameters


class CentralSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """ARES's scheduler, which sees the snapshots of all instances. Needs ``migration.on``.

    Attributes:
        on: Whether there is one.
        parameters: Of the policy.
        interval_ms: Between two decisions; the paper's example is a second.
        horizon_ms, points: Of the forecast loads.
        move_ms: What a move is taken to last before the first one.
    """

    on: bool = False
    parameters: Parameters = Parameters()
    interval_ms: int = 1_000
    horizon_ms: int = 30_000
    points: int = 16
    move_ms: int = 100

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        for field in ("interval_ms", "horizon_ms", "points", "move_ms"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, is {getattr(self, field)}")
