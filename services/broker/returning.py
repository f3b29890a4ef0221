"""Queued sequences of an instance that drains. They hold no KV, so nothing of them moves: their worker hands them back
to their ingresses, which dispatch them anew.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Log, Publish
from millrace.contracts.broker import MoveReason
from millrace.contracts.worker import ReturnSequences

from services.broker.intents import length_of
from services.broker.state import MS, BrokerContext, OwnInstance

#: Of one message; a long queue goes back in several ticks, so that no ingress has to dispatch all of it at once.
RETURNED_MAX = 64

#: A sequence is asked back once in this time: the message may be lost, or its engine have begun with it.
AGAIN_NS = 1_000 * MS


def return_queued(ctx: BrokerContext, own: OwnInstance, now_ns: int) -> list[Effect]:
    """Asks the worker for what only waits there, where another instance serves the model."""
    notes = own.sequences
    notes.returned = {name: at_ns for name, at_ns in notes.returned.items() if now_ns - at_ns < AGAIN_NS}
    if not own.draining or own.snapshot is None or not ctx.fresh(own, now_ns):
        return []
    queued = [each for each in own.snapshot.waiting if not each.blocks and each.sequence not in notes.returned]
    if not queued or not ctx.view.targets(own.instance, MoveReason.DRAIN, length_of(queued[0]), now_ns):
        return []
    names = [each.sequence for each in queued[:RETURNED_MAX]]
    notes.returned |= dict.fromkeys(names, now_ns)
    ctx.metrics.returned += len(names)
    fields = {"instance": own.instance, "sequences": len(names)}
    return [
        Publish(subject=ctx.subjects.engine(own.instance, "return"), body=ReturnSequences(sequences=names)),
        Log(level="debug", event="queue_returned", fields=fields),
    ]
