"""W3C trace context as values: parse, format, child, sampling decision. Pure; randomness comes in as an rng.

Source: W3C Trace Context, sections 3.2 and 4.3. ``tracestate`` is not carried: nothing in Millrace needs it.
"""

from __future__ import annotations

import random
import re

import msgspec

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FLAG_SAMPLED = 0x01


class TraceContext(msgspec.Struct, frozen=True):
    """One span's identity.

    Attributes:
        trace_id: 32 lower-case hex digits, not all zero.
        span_id: 16 lower-case hex digits, not all zero.
        sampled: Whether spans of this trace are recorded.
    """

    trace_id: str
    span_id: str
    sampled: bool


def parse_traceparent(header: str) -> TraceContext | None:
    """Reads a ``traceparent``; None where it is absent or malformed (the standard says: go on as if there were none).

    A later version is read as far as version 00 goes; version ``ff``, upper case and all-zero ids are malformed.
    """
    match = _TRACEPARENT.fullmatch(header.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _FLAG_SAMPLED))


def sampled_context(header: str) -> TraceContext | None:
    """Reads a ``traceparent``; None where its trace is not recorded."""
    context = None if header.endswith("0") else parse_traceparent(header)
    return context if context is not None and context.sampled else None


def format_traceparent(context: TraceContext) -> str:
    """Writes a context as a version-00 ``traceparent``."""
    return f"00-{context.trace_id}-{context.span_id}-{'01' if context.sampled else '00'}"


def new_trace(rng: random.Random, *, sampled: bool) -> TraceContext:
    """The root context of a new trace."""
    return TraceContext(f"{_nonzero_bits(rng, 128):032x}", f"{_nonzero_bits(rng, 64):016x}", sampled)


def child(parent: TraceContext, rng: random.Random) -> TraceContext:
    """A new span in the parent's trace, sampled as the parent is."""
    return TraceContext(parent.trace_id, f"{_nonzero_bits(rng, 64):016x}", parent.sampled)


def sample(rng: random.Random, share: float) -> bool:
    """Whether to record a new trace: true for ``share`` of all draws; 0 never, 1 always."""
    return rng.random() < share


def _nonzero_bits(rng: random.Random, bits: int) -> int:
    while not (number := rng.getrandbits(bits)):
        pass  # zero is no id; it comes once in 2**bits
    return number
