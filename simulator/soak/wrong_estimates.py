"""Estimates of remaining lengths as a broken head might tell them: ten times too long or short, negative, no number."""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

import msgspec
from millrace.contracts.status import SequenceStatus

#: Kinds, drawn by the sequence's name.
KINDS = ("ten times", "a tenth", "negative", "no number", "p90 below p50", "older than it can be", "none")


def wrong(status: SequenceStatus) -> SequenceStatus:
    """The status with an estimate that is wrong in the way of its sequence."""
    kind = KINDS[crc32(status.sequence.encode()) % len(KINDS)]
    generated = status.output_tokens
    if kind == "none" or generated < 1:
        return status
    p50, p90, at = _numbers(kind, generated, status.max_tokens)
    return msgspec.structs.replace(status, expected_output_tokens=p50, expected_p90=p90, expected_at=at)


def _numbers(kind: str, generated: int, bound: int) -> tuple[Any, Any, int]:
    """p50 and p90 of the whole output, and when that was estimated."""
    match kind:
        case "ten times":
            return generated + 10 * bound, generated + 20 * bound, generated
        case "a tenth":
            return generated + 1, generated + 2, generated
        case "negative":
            return -generated, -1, generated
        case "no number":
            return math.nan, math.nan, generated
        case "p90 below p50":
            return generated + 50, generated + 5, generated
        case _:
            return generated + 50, generated + 90, generated + 10_000
