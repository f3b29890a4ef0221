"""Durations in nanoseconds: of the configuration, and those that nobody has to change."""

from __future__ import annotations

import msgspec

from services.ingress.config import IngressConfig

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000

#: Time for a worker to answer a submission; it answers in a millisecond or not at all.
SUBMIT_TIMEOUT_NS = 1 * SECOND_NS

#: After three failures in a row the tagger is not asked for so long.
TAG_PAUSE_NS = 1 * SECOND_NS

#: After the bus came back no instance is suspected for so long: as long as a connection takes to settle.
RECONNECT_GRACE_NS = 2 * SECOND_NS

#: Time for a worker to answer a resend.
RESEND_TIMEOUT_NS = 1 * SECOND_NS

#: A sequence without a token for so long is asked about (the last tokens may be lost); doubles each time up to
#: a quarter of ``stall_s``.
PROBE_NS = 2 * SECOND_NS


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the configuration, nanoseconds."""

    call_timeout: int
    drain: int
    wait: int
    tag_timeout: int
    hang: int
    hang_failover: int
    stall: int
    queue_stall: int
    continuation: int

    @classmethod
    def of(cls, config: IngressConfig) -> Times:
        ns = _ns
        c = config.continuation
        return cls(
            call_timeout=ns(config.limits.call_timeout_s),
            drain=ns(config.limits.drain_s),
            wait=ns(config.dispatch.wait_s),
            tag_timeout=ns(config.tagging.timeout_s),
            hang=ns(c.hang_s),
            hang_failover=ns(c.hang_failover_s),
            stall=ns(c.stall_s),
            queue_stall=ns(c.queue_stall_s),
            continuation=ns(c.deadline_s),
        )


def _ns(seconds: float) -> int:
    return int(seconds * SECOND_NS)
