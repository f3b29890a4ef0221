"""What the coordinator knows of one cascade."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.plan import Lease

from services.coordinator.cascade_config import CoordinatedCascade
from services.coordinator.state import Held

#: Finished requests kept of one cascade. At 10 a second the usual window of 10 minutes is nearly whole.
SAMPLES_MAX = 4_096


class FinishedRequest(msgspec.Struct, frozen=True):
    """A finished request of a cascade: when it came, its lengths, and what its first answer scored (None: nothing)."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    score: float | None


@dataclass
class CascadeState:
    """Lease, plan and traffic of one cascade.

    Attributes:
        finished: Requests, oldest first.
        planned_for: Those that the plan in force was made from; empty before the first.
        planning: Whether a planner is at work.
        looked_ns: When it was last looked at whether the plan fits.
        planned_ns: When the last planner was started; 0 for never.
        failures: Planners in a row that failed.
        told: What the planner would do with other instances; empty for nothing.
    """

    config: CoordinatedCascade
    lease: Lease | None = None
    lease_key: Held = field(default_factory=Held)
    plan: CascadePlan | None = None
    plan_key: Held = field(default_factory=Held)
    finished: deque[FinishedRequest] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    planned_for: list[FinishedRequest] = field(default_factory=list)
    planning: bool = False
    looked_ns: int = 0
    planned_ns: int = 0
    failures: int = 0
