"""Thresholds of liveness, the same for every service that follows instances."""

from __future__ import annotations

from typing import Annotated

import msgspec

from millrace.actor.config_marks import CONSTANT
from millrace.contracts.bounds import Count

_MS = 1_000_000


class MembershipConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times after which an instance or a service counts as silent. In milliseconds.

    Attributes:
        instance_silence_ms: An instance without a summary for this long gets no new work. Summaries come at least
            every 250 ms, so six in a row are missing: one or two are lost when a connection is made anew, and a
            pause of the worker's process rarely takes a second.
        members_max: Instances known at once. A cluster has hundreds.
    """

    instance_silence_ms: Count = 1_500
    members_max: Annotated[Count, CONSTANT] = 4_096

    @property
    def instance_silence_ns(self) -> int:
        return self.instance_silence_ms * _MS

    @property
    def plan_silence_ns(self) -> int:
        """An instance without a summary for this long leaves the plan: twice as long, because a new plan costs every
        service a change, and dispatch avoids the instance already.
        """
        return 2 * self.instance_silence_ns
