"""Durations of the configuration in nanoseconds."""

from __future__ import annotations

import msgspec

from services.ingress.cluster.instances import HangLimits
from services.ingress.config import ContinuationConfig, IngressConfig

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the configuration, nanoseconds."""

    call_timeout: int
    drain: int
    submit_timeout: int
    wait: int
    tag_timeout: int
    tag_pause: int
    hang: int
    hang_failover: int
    reconnect_grace: int
    resend_timeout: int
    probe: int
    stall: int
    queue_stall: int
    continuation: int

    @classmethod
    def of(cls, config: IngressConfig) -> Times:
        """Convert once."""
        ns = _ns
        c = config.continuation
        return cls(
            call_timeout=ns(config.limits.call_timeout_s),
            drain=ns(config.limits.drain_s),
            submit_timeout=ns(config.dispatch.submit_timeout_s),
            wait=ns(config.dispatch.wait_s),
            tag_timeout=ns(config.tagging.timeout_s),
            tag_pause=ns(config.tagging.pause_s),
            hang=ns(c.hang_s),
            hang_failover=ns(c.hang_failover_s),
            reconnect_grace=ns(c.reconnect_grace_s),
            resend_timeout=ns(c.resend_timeout_s),
            probe=ns(c.probe_s),
            stall=ns(c.stall_s),
            queue_stall=ns(c.queue_stall_s),
            continuation=ns(c.deadline_s),
        )


def hang_limits(config: ContinuationConfig) -> HangLimits:
    """Limits beyond which an engine counts as hung, from the configuration."""
    return HangLimits(silent_ns=_ns(config.hang_s), step_ns=_ns(config.step_s), step_factor=config.step_factor)


def _ns(seconds: float) -> int:
    return int(seconds * SECOND_NS)
