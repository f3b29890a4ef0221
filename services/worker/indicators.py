"""Indicators of an instance's load for policies on roles: queues by phase and totals, from an engine's snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millrace.contracts.kv import KvGroup, blocks_for
from millrace.contracts.status import EngineSnapshot, LoadIndicators, PhaseQueues, SequenceState, SequenceStatus

from services.worker.state import Held


def load_indicators(
    snapshot: EngineSnapshot,
    unseen: Iterable[Held],
    *,
    now_ns: int,
    block_size: int,
    groups: Sequence[KvGroup] = (),
    moves: tuple[int, int],
) -> LoadIndicators:
    """Count what a snapshot shows.

    Args:
        unseen: Sequences submitted after it.
        groups: Of layers, each with blocks of its own.
        moves: Sequences whose KV leaves, and those whose KV arrives.
    """
    prefill, decode = [0, 0, 0], [0, 0, 0]
    left = growing = 0
    oldest_ns = now_ns
    preempted = SequenceState.PREEMPTED
    for place, entries in ((0, snapshot.running), (1, snapshot.waiting)):
        for entry in entries:
            output = entry.output_tokens
            (decode if output else prefill)[2 if entry.state is preempted else place] += 1
            if entry.expected_output_tokens is not None:
                growing += blocks_to_come(entry, block_size, groups)
            to_compute = entry.prompt_tokens + output - entry.computed_tokens
            if to_compute > 1 or not output:
                left += to_compute
            if place and not output and entry.arrival_ns < oldest_ns:
                oldest_ns = entry.arrival_ns
    for held in unseen:
        prefill[1] += 1
        left += held.to_compute
        oldest_ns = min(oldest_ns, held.received_ns)
    leaving, arriving = moves
    return LoadIndicators(
        PhaseQueues(prefill[0], prefill[1], prefill[2], leaving),
        PhaseQueues(decode[0], decode[1], decode[2], arriving),
        max(0, left),
        max(0, now_ns - oldest_ns),
        growing,
        snapshot.totals,
    )


def blocks_to_come(entry: SequenceStatus, block_size: int, groups: Sequence[KvGroup] = ()) -> int:
    """Blocks that a sequence is expected to need beyond those that it holds; 0 where no length is expected."""
    if entry.expected_output_tokens is None:
        return 0
    output = min(max(entry.expected_output_tokens, entry.output_tokens), entry.max_tokens)
    return max(0, blocks_for(entry.prompt_tokens + output, block_size, groups) - entry.blocks)
