"""Durations in nanoseconds: of the configuration, and those that nobody has to change."""

from __future__ import annotations

import msgspec

from services.ingress.cluster.instances import HangLimits
from services.ingress.config import ContinuationConfig, IngressConfig

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000

#: Time for a worker to answer a submission, seconds; it answers in a millisecond or not at all.
SUBMIT_TIMEOUT_S = 1.0

#: After three failures in a row the tagger is not asked for so long, seconds.
TAG_PAUSE_S = 1.0

#: An engine step of so long is suspect, seconds: it gets no new sequence (``HangLimits.step_factor`` spares long ones).
STEP_S = 5.0

#: After the bus came back no instance is suspected for so long, seconds: as long as a connection takes to settle.
RECONNECT_GRACE_S = 2.0

#: Time for a worker to answer a resend, seconds.
RESEND_TIMEOUT_S = 1.0

#: A sequence without a token for so long is asked about (the last tokens may be lost), seconds; doubles each time up to
#: a quarter of ``stall_s``.
PROBE_S = 2.0


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
            submit_timeout=ns(SUBMIT_TIMEOUT_S),
            wait=ns(config.dispatch.wait_s),
            tag_timeout=ns(config.tagging.timeout_s),
            tag_pause=ns(TAG_PAUSE_S),
            hang=ns(c.hang_s),
            hang_failover=ns(c.hang_failover_s),
            reconnect_grace=ns(RECONNECT_GRACE_S),
            resend_timeout=ns(RESEND_TIMEOUT_S),
            probe=ns(PROBE_S),
            stall=ns(c.stall_s),
            queue_stall=ns(c.queue_stall_s),
            continuation=ns(c.deadline_s),
        )


def hang_limits(config: ContinuationConfig) -> HangLimits:
    """Limits beyond which an engine counts as hung, from the configuration."""
    return HangLimits(silent_ns=_ns(config.hang_s), step_ns=_ns(STEP_S))


def _ns(seconds: float) -> int:
    return int(seconds * SECOND_NS)
