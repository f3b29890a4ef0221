"""Bids of our instances: whether one would take a sequence, and what that would cost its others.

A bid is a reservation: until its deadline its blocks are counted as used. Its worker hears it, too, and takes no award
without it.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Publish
from millrace.contracts.broker import AskForMove, BidRefusal, MoveBid, MoveReason
from millrace.contracts.kv import compatible
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import InstanceRecord
from millrace.policies.trading import BurdenView

from services.broker.asks import GROWTH_BLOCKS
from services.broker.intents import asked_sequence
from services.broker.loads import present_load
from services.broker.shortage import shortage_risk
from services.broker.state import MS, BrokerContext, MoveHistory, OpenBid, OwnInstance

#: How long a bid holds: ten times what an award takes on a busy machine. Of several bidders all but one hold it in
#: vain.
BID_MS = 500

#: Bids of an instance that hold at a time. Its worker takes as many awards, and of the bids for one sequence only one
#: is awarded.
BIDS_MAX = 8

#: Bids that have held are remembered for so long, for the history of what came, and no more of them than this.
USED_NS, USED_MAX = 30_000 * MS, 1_024

#: A sequence that is here for so long after its bid has come, though nothing was heard of its move's end.
ARRIVED_NS = 2_000 * MS

#: Reasons for which an instance refuses a sequence when its memory may run short.
_DEFERRED = frozenset({MoveReason.HANDOFF, MoveReason.BALANCE, MoveReason.MEMORY})


class Bids:
    """Answers asks for our instances."""

    def __init__(self, ctx: BrokerContext) -> None:
        self._ctx = ctx

    def on_ask(self, own: OwnInstance, body: AskForMove, now_ns: int) -> list[Effect]:
        """Bids for a sequence, or says why not. Repeated, it is answered anew."""
        record = self._ctx.view.record(own.instance)
        if record is None or not self._ctx.connected:
            return []
        self.expire(own, now_ns)
        refusal = self._refusal(own, record, body, now_ns)
        answer = self._bid(own, record, body, now_ns) if refusal is None else refusal
        bid = answer if isinstance(answer, MoveBid) else self._worded(own, body, refusal=answer)
        self._ctx.metrics.bids.add(str(bid.refusal or "bid"))
        subject = self._ctx.subjects.bid(body.source, own.instance)
        return [Publish(subject=subject, body=bid, request=request_id_of(body.sequence))]

    def _refusal(self, own: OwnInstance, record: InstanceRecord, body: AskForMove, now_ns: int) -> BidRefusal | None:
        source = self._ctx.view.record(body.source)
        if body.source == own.instance or body.model != record.model:
            return BidRefusal.INVALID
        if own.draining:
            return BidRefusal.DRAINING
        if not self._ctx.fresh(own, now_ns):
            return BidRefusal.NOT_READY
        if body.plan_epoch != self._ctx.view.plan_epoch(record.model):
            return BidRefusal.STALE_PLAN
        if not body.recompute and (source is None or not compatible(source.kv, record.kv)):
            return BidRefusal.INCOMPATIBLE
        if body.prompt_tokens + body.output_tokens >= record.max_model_len:
            return BidRefusal.TOO_LONG
        if len(own.bids) >= BIDS_MAX and body.ask not in own.bids:
            return BidRefusal.FULL
        return None

    def _bid(self, own: OwnInstance, record: InstanceRecord, body: AskForMove, now_ns: int) -> MoveBid | BidRefusal:
        snapshot = own.snapshot
        assert snapshot is not None
        own.bids.pop(body.ask, None)
        idle = snapshot.blocks_free - own.promised_blocks - body.blocks - GROWTH_BLOCKS
        if idle < 0 or len(snapshot.running) + len(own.promised) >= record.max_sequences:
            return BidRefusal.NO_ROOM
        if body.reason in _DEFERRED and self._risk_with(own, record, body) > self._ctx.config.memory.join_risk_max:
            return BidRefusal.NO_ROOM
        forecast = None
        if own.forecasts is not None and self._ctx.policy.needs_forecast:
            forecast = own.forecasts.join(snapshot, self._ctx.view.boundary(own.instance), now_ns, body)
        if forecast is not None and forecast.preemptions > 0 and body.reason in (MoveReason.BALANCE, MoveReason.MEMORY):
            return BidRefusal.NO_ROOM
        load = present_load(own)
        view = BurdenView(
            own=load,
            sequence=asked_sequence(body),
            reason=body.reason,
            asker=self._ctx.view.load(body.source, now_ns),
            peers=self._ctx.view.peers(own.instance, now_ns),
            forecast=forecast,
        )
        own.bids[body.ask] = OpenBid(ask=body, until_ns=now_ns + BID_MS * MS)
        return self._worded(
            own,
            body,
            burden_ns=self._ctx.policy.burden(view, self._ctx.parameters),
            load_tokens=load.demand,
            blocks_idle=idle,
            rest_ns=forecast.rest_ns if forecast is not None else 0,
            preemptions=max(0, forecast.preemptions) if forecast is not None else 0,
            valid_ms=BID_MS,
        )

    def _worded(self, own: OwnInstance, body: AskForMove, **fields: object) -> MoveBid:
        return MoveBid(
            ask=body.ask,
            sequence=body.sequence,
            source=body.source,
            bidder=own.instance,
            plan_epoch=body.plan_epoch,
            **fields,  # type: ignore[arg-type]
        )

    def _risk_with(self, own: OwnInstance, record: InstanceRecord, body: AskForMove) -> float:
        """Probability that memory runs short here if the sequence comes; not computed where it does not matter."""
        assert own.snapshot is not None
        memory = self._ctx.config.memory
        if memory.join_risk_max >= 1:
            return 0.0
        return shortage_risk(
            own.snapshot,
            record,
            horizon_ns=memory.join_horizon_ms * MS,
            promised_blocks=own.promised_blocks + body.blocks,
        )

    # ends

    def on_finished(self, own: OwnInstance, body: MigrationFinished, now_ns: int) -> None:
        """A migration to an instance of ours is over: its bid as well, and its sequence's moves are remembered."""
        bid = own.bids.pop(body.award, None) or own.used.pop(body.award, None)
        own.used = {name: other for name, other in own.used.items() if other.ask.sequence != body.sequence}
        if body.outcome is not MigrationOutcome.MOVED:
            return
        moves = bid.ask.moves if bid is not None and bid.ask.sequence == body.sequence else 0
        history = MoveHistory(
            balance_moves=moves + (body.reason is MoveReason.BALANCE),
            moved_ns=now_ns,
            tokens=max(0, body.cost.tokens),
            duration_ns=max(0, body.cost.duration_ns),
        )
        own.sequences.remember(body.sequence, history)

    def expire(self, own: OwnInstance, now_ns: int) -> None:
        """Bids whose deadline has passed hold nothing any more."""
        for name, bid in list(own.bids.items()):
            if now_ns >= bid.until_ns:
                own.used[name] = own.bids.pop(name)
        for name, bid in list(own.used.items()):
            arrived = now_ns - bid.until_ns >= ARRIVED_NS and own.status(bid.ask.sequence) is not None
            if arrived or now_ns - bid.until_ns >= USED_NS or len(own.used) > USED_MAX:
                self._forget(own, own.used.pop(name))

    def _forget(self, own: OwnInstance, bid: OpenBid) -> None:
        """The end of its move was not heard: what is here has come by it, as far as is known."""
        ask = bid.ask
        if own.status(ask.sequence) is not None and ask.sequence not in own.sequences.histories:
            moves = ask.moves + (ask.reason is MoveReason.BALANCE)
            history = MoveHistory(balance_moves=moves, moved_ns=bid.until_ns, tokens=ask.prompt_tokens)
            own.sequences.remember(ask.sequence, history)

    def void(self, own: OwnInstance) -> None:
        """A new plan, or the bus was away: bids hold no longer, but their awards may be on their way."""
        own.used |= own.bids
        own.bids.clear()
