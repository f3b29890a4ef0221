"""Chunks that belong to nobody here: dropped and counted, and their engine told to stop wasting steps on them."""

from __future__ import annotations

from millrace.actor.effects import Effect, Publish
from millrace.contracts.ingress import TokenChunk
from millrace.contracts.worker import CancelSequence

from services.ingress.calls.completion import acknowledge
from services.ingress.state import IngressState, OpenSequence
from services.ingress.times import SECOND_NS

#: A stray sequence is cancelled at most this often: cancels take a step to work, and its chunks go on until then.
CANCEL_EVERY_NS = 1 * SECOND_NS
#: Stray sequences remembered. Beyond it all are forgotten: the price is a cancel more.
DISOWNED_MAX = 4_096


def note_stray(
    state: IngressState, chunk: TokenChunk, sequence: OpenSequence | None, instance: str, out: list[Effect]
) -> None:
    """A chunk of an ended or unknown sequence, of an old epoch, or from an instance that does not own it.

    A finished one is acknowledged (the acknowledgement may have been lost), a running one cancelled (the cancel may
    have been), also one of an allotted epoch that is void. One of the present epoch, or of one that was never given
    out, is neither: nothing here could have caused it.
    """
    state.metrics.discarded.add("late")
    if sequence is not None and (chunk.epoch == sequence.epoch or chunk.epoch > sequence.epoch_max):
        return
    if chunk.finish is not None:
        acknowledge(state, instance, chunk.sequence, chunk.epoch, out)
        return
    disown(state, chunk.sequence, chunk.epoch, instance, out)


def disown(state: IngressState, sequence: str, epoch: int, instance: str, out: list[Effect]) -> None:
    """Tells an instance to drop a sequence up to an epoch that it does not own; not too often."""
    now_ns, key = state.now_ns, (sequence, instance)
    if state.disowned.get(key, 0) > now_ns:
        return
    if len(state.disowned) >= DISOWNED_MAX:
        state.disowned.clear()
    state.disowned[key] = now_ns + CANCEL_EVERY_NS
    out.append(
        Publish(
            subject=state.subjects.engine(instance, "cancel"),
            body=CancelSequence(sequence=sequence, epoch=epoch, reason="stray"),
        )
    )
