"""Probability that an instance's memory runs short before a move could help. Pure."""

from __future__ import annotations

import math

from millrace.contracts.status import InstanceRecord, StatusSnapshot
from millrace.lengths.memory_risk import memory_risk


def shortage_risk(snapshot: StatusSnapshot, record: InstanceRecord, *, horizon_ns: int, promised_blocks: int) -> float:
    """The greatest probability, over the horizon, that running sequences need more blocks than there are.

    0 before the first step and where everybody has room to grow for so long.

    Args:
        promised_blocks: Of sequences that are to come; they count as they are now.
    """
    if snapshot.step_duration_ns <= 0 or not snapshot.running:
        return 0.0
    horizon_tokens = max(1, math.ceil(horizon_ns / snapshot.step_duration_ns))
    groups = record.kv.groups if record.kv is not None else []
    growth = len(snapshot.running) * max(1, len(groups)) * (1 + horizon_tokens // record.block_size)
    if snapshot.blocks_free - promised_blocks >= growth:
        return 0.0
    return memory_risk(
        snapshot,
        block_size=record.block_size,
        groups=groups,
        horizon_tokens=horizon_tokens,
        reserved_blocks=max(0, promised_blocks),
    )
