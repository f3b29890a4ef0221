"""Queued sequences that should wait elsewhere. They hold no KV, so nothing of them moves: their worker hands them back
to their ingresses, which dispatch them anew.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Log, Publish
from millrace.contracts.broker import MoveReason
from millrace.contracts.status import SequenceStatus
from millrace.contracts.worker import ReturnSequences

from services.broker.asks import BALANCE_PAUSE_MS, GROWTH_BLOCKS
from services.broker.fences import length_of
from services.broker.state import MS, BrokerContext, OwnInstance

#: Of one message; a long queue goes back in several ticks, so that no ingress has to dispatch all of it at once.
RETURNED_MAX = 64

#: A sequence is asked back once in this time: the message may be lost, or its engine have begun with it.
AGAIN_NS = 1_000 * MS


class Returning:
    """Asks the workers of our instances for what only waits there."""

    def __init__(self, ctx: BrokerContext) -> None:
        self._ctx = ctx

    def look(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """All of the queue where the instance drains; its last one where a peer could begin with it at once."""
        own.sequences.returned = {
            name: at_ns for name, at_ns in own.sequences.returned.items() if now_ns - at_ns < AGAIN_NS
        }
        record, reasons = self._ctx.view.record(own.instance), self._ctx.config.trading.returns
        if record is None or own.snapshot is None or not self._ctx.fresh(own, now_ns):
            return []
        queued = [
            each for each in own.snapshot.waiting if not each.blocks and each.sequence not in own.sequences.returned
        ]
        if not queued:
            return []
        if own.draining:
            return self._drained(own, queued, now_ns) if MoveReason.DRAIN in reasons else []
        return self._balanced(own, queued, now_ns) if MoveReason.BALANCE in reasons else []

    def _drained(self, own: OwnInstance, queued: list[SequenceStatus], now_ns: int) -> list[Effect]:
        length = length_of(queued[0])
        if not self._ctx.view.targets(own.instance, MoveReason.DRAIN, length, now_ns):
            return []  # nobody else serves the model
        return self._return(own, MoveReason.DRAIN, queued[:RETURNED_MAX], now_ns)

    def _balanced(self, own: OwnInstance, queued: list[SequenceStatus], now_ns: int) -> list[Effect]:
        """The last of the queue, where it has waited for a while and a peer has neither a queue nor too little room."""
        assert own.snapshot is not None
        last, pause_ns = queued[-1], BALANCE_PAUSE_MS * MS
        if own.snapshot.at_ns - last.arrival_ns < pause_ns or now_ns - own.balance.ended_ns < pause_ns:
            return []
        record = self._ctx.view.record(own.instance)
        assert record is not None
        blocks = -(-length_of(last) // record.block_size) + GROWTH_BLOCKS
        peers = self._ctx.view.peers(own.instance, now_ns)
        if not any(peer.waiting == 0 and not peer.queued_tokens and peer.blocks_free >= blocks for peer in peers):
            return []
        own.balance.ended_ns = now_ns
        return self._return(own, MoveReason.BALANCE, [last], now_ns)

    def _return(self, own: OwnInstance, reason: MoveReason, queued: list[SequenceStatus], now_ns: int) -> list[Effect]:
        names = [each.sequence for each in queued]
        own.sequences.returned |= dict.fromkeys(names, now_ns)
        self._ctx.metrics.returned += len(names)
        fields = {"instance": own.instance, "reason": str(reason), "sequences": len(names)}
        return [
            Publish(subject=self._ctx.subjects.engine(own.instance, "return"), body=ReturnSequences(sequences=names)),
            Log(level="debug", event="queue_returned", fields=fields),
        ]
