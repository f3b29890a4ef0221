"""Thresholds of liveness, the same for every service that follows instances."""

from __future__ import annotations

import msgspec

from millrace.contracts.bounds import Count

_MS = 1_000_000


class MembershipConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times after which an instance or a service counts as silent. In milliseconds.

    Attributes:
        instance_silence_ms: An instance without a summary for this long gets no new work. Summaries come at least
            every 250 ms, so six in a row are missing: one or two are lost when a connection is made anew, and a
            pause of the worker's process rarely takes a second.
        plan_silence_ms: An instance without a summary for this long leaves the plan. Twice the time above: a new plan
            costs every service a change, and dispatch avoids the instance already.
        members_max: Instances known at once. A cluster has hundreds.
    """

    instance_silence_ms: Count = 1_500
    plan_silence_ms: Count = 3_000
    members_max: Count = 4_096

    def __post_init__(self) -> None:
        """Raises ValueError where the plan would be faster than dispatch."""
        if self.plan_silence_ms < self.instance_silence_ms:
            raise ValueError(f"plan_silence_ms must be at least instance_silence_ms, is {self.plan_silence_ms}")

    @property
    def instance_silence_ns(self) -> int:
        """``instance_silence_ms`` in nanoseconds."""
        return self.instance_silence_ms * _MS

    @property
    def plan_silence_ns(self) -> int:
        """``plan_silence_ms`` in nanoseconds."""
        return self.plan_silence_ms * _MS
