"""The coordinator's state of one cascade."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.plan import Lease
from millrace.contracts.status import InstanceRecord

from services.coordinator.cascade_config import CoordinatedCascade
from services.coordinator.state import KeyState

#: Finished requests kept of one cascade. At 27 a second the usual window of 10 minutes is whole; some 2 MB.
SAMPLES_MAX = 16_384


class CascadeTraffic(msgspec.Struct, frozen=True):
    """A finished request of a cascade.

    Attributes:
        output_tokens: Of the first attempt.
        score: Of the first attempt's answer; None where it has none.
        by_budget: Whether it got an answer that only the escalation budget accepted.
    """

    arrival_ns: int
    ended_ns: int
    prompt_tokens: int
    output_tokens: int
    score: float | None
    by_budget: bool = False


class TrafficSpan(msgspec.Struct, frozen=True):
    """All requests that arrived from ``start_ns`` on and before ``until_ns``."""

    requests: list[CascadeTraffic]
    start_ns: int
    until_ns: int


@dataclass
class MoveOrder:
    """Something that a provisioner was asked for.

    Attributes:
        name: Unique for ever.
        action: ``start`` or ``stop``.
        instance: Empty until a start is accepted.
        host_index: Who is asked, or has accepted it.
        accepted: Whether it is being carried out.
    """

    name: str
    action: str
    model: str
    instance: str = ""
    host_index: int = 0
    accepted: bool = False


#: Serving instances of each model.
Serving = Mapping[str, Sequence[InstanceRecord]]


@dataclass
class CascadeState:
    """Lease, plan and traffic of one cascade.

    Attributes:
        records: The newest record of an instance by model: what a tier is when nobody serves it any more.
        finished: Requests, oldest first.
        shadows: Scores of every tier but the last by shadow runs, with the arrival of the request; oldest first.
        baseline: The first ones under the thresholds in force: what later traffic is compared with; None until there
            are enough. Early rejection cuts answers by threshold, so traffic under other thresholds looks different
            without being so.
        since_ns: When the thresholds in force were seen first.
        why: Why the planner at work was started; empty where none is.
        looked_ns: When it was last looked at whether the plan fits.
        planned_ns: When the last planner was started; 0 for never.
        planned_empty: Models without an instance at the last planning; None before the first.
        budget_epoch: Plan for which a planner was started because the escalation budget lowered its thresholds.
        failures: Planners in a row that failed.
        orders: Open orders of the plan's move: one stop, or starts.
        order_pause_ns: None is given before.
        refusals: Tries in a row in which somebody refused.
    """

    config: CoordinatedCascade
    lease: Lease | None = None
    lease_key: KeyState = field(default_factory=KeyState)
    plan: CascadePlan | None = None
    plan_key: KeyState = field(default_factory=KeyState)
    finished: deque[CascadeTraffic] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    shadows: deque[tuple[int, list[float | None]]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    records: dict[str, InstanceRecord] = field(default_factory=dict)
    baseline: TrafficSpan | None = None
    since_ns: int = 0
    why: str = ""
    looked_ns: int = 0
    planned_ns: int = 0
    planned_empty: list[str] | None = None
    budget_epoch: int = -1
    failures: int = 0
    orders: list[MoveOrder] = field(default_factory=list)
    order_pause_ns: int = 0
    refusals: int = 0
