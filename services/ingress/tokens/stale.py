"""Stale tokens: chunks that belong to no sequence here are dropped and counted, and their engine is told to stop."""

from __future__ import annotations

from millrace.contracts.ingress import TokenChunk

from services.ingress.calls.completion import acknowledge
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS

#: A stale sequence is cancelled at most this often: a cancel takes a step to work, and chunks go on until then.
CANCEL_EVERY_NS = 1 * SECOND_NS
#: Stale sequences remembered. Beyond it all are forgotten, which costs one more cancel each.
STALE_MAX = 4_096


def drop_stale(state: IngressState, chunk: TokenChunk, sequence: OpenSequence | None, instance: str) -> None:
    """Drop a chunk of an ended or unknown sequence, of an old epoch, or from an instance that does not own it.

    A finished sequence is acknowledged (the acknowledgement may have been lost), a running one is cancelled (the cancel
    may have been lost), also in a revoked epoch. A chunk of the present epoch, or of one that was never given out, is
    neither: nothing here could have caused it.
    """
    state.metrics.discarded.add("late")
    if sequence is not None and (chunk.epoch == sequence.epoch or chunk.epoch > sequence.epoch_max):
        return
    if chunk.finish is not None:
        acknowledge(state, instance, chunk.sequence, chunk.epoch)
        return
    cancel_stale(state, chunk.sequence, chunk.epoch, instance)


def cancel_stale(state: IngressState, sequence: str, epoch: int, instance: str) -> None:
    """Cancel a sequence, up to an epoch, at an instance that does not own it; not too often."""
    now_ns, key = state.now_ns, (sequence, instance)
    if state.stale_until_ns.get(key, 0) > now_ns:
        return
    if len(state.stale_until_ns) >= STALE_MAX:
        state.stale_until_ns.clear()
    state.stale_until_ns[key] = now_ns + CANCEL_EVERY_NS
    state.cancel(sequence, epoch, instance, "stray")
