"""Durations in nanoseconds: of the configuration, and those that nobody has to change."""

from __future__ import annotations

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


class Times:
    """Durations of the configuration, nanoseconds."""

    def __init__(self, config: IngressConfig) -> None:
        limits, continuation = config.limits, config.continuation
        self.call_timeout = _ns(limits.call_timeout_s)
        self.drain = _ns(limits.drain_s)
        self.wait = _ns(config.dispatch.wait_s)
        self.tag_timeout = _ns(config.tagging.timeout_s)
        self.hang = _ns(continuation.hang_s)
        self.hang_failover = _ns(continuation.hang_failover_s)
        self.stall = _ns(continuation.stall_s)
        self.queue_stall = _ns(continuation.queue_stall_s)
        self.continuation = _ns(continuation.deadline_s)


def _ns(seconds: float) -> int:
    return int(seconds * SECOND_NS)
