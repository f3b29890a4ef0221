"""Bids of our instances: whether one would take a sequence, and what that would cost its others."""

from __future__ import annotations

from millrace.actor.effects import Effect, Publish
from millrace.contracts.broker import AskForMove, DealRefusal, MoveBid, MoveReason, NoBid
from millrace.contracts.message import Body
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import InstanceRecord
from millrace.policies.migration import compatible
from millrace.policies.trading import BurdenView, MovableSequence

from services.broker.deals import LENGTH_MAX, TIME_MAX, OpenBid
from services.broker.loads import present_load
from services.broker.shortage import shortage_risk
from services.broker.state import MS, BrokerContext, OwnInstance

#: Who may as well stay where it is when memory here may run short; a drain and a boundary cannot wait.
_KEPT_OUT = frozenset({MoveReason.HANDOFF, MoveReason.BALANCE, MoveReason.MEMORY})


class Bidding:
    """Answers asks for our instances."""

    def __init__(self, ctx: BrokerContext) -> None:
        self._ctx = ctx

    def on_ask(self, own: OwnInstance, body: AskForMove, now_ns: int) -> list[Effect]:
        """Bids for a sequence, or says why not. Repeated, it is answered anew: bids are not binding for the asker."""
        record = self._ctx.view.record(own.instance)
        if record is None or not self._ctx.connected:
            return []
        refusal = self._refusal(own, record, body, now_ns)
        answer = self._bid(own, record, body, now_ns) if refusal is None else refusal
        if isinstance(answer, DealRefusal):
            self._ctx.metrics.bids[str(answer)] += 1
            no_bid = NoBid(
                deal=body.deal, sequence=body.sequence, source=body.source, bidder=own.instance, reason=answer
            )
            return [self._to_source(body.source, body.sequence, no_bid)]
        self._ctx.metrics.bids["bid"] += 1
        return [self._to_source(body.source, body.sequence, answer)]

    def _to_source(self, source: str, sequence: str, body: Body) -> Effect:
        return Publish(subject=self._ctx.subjects.bid(source), body=body, request=request_id_of(sequence))

    def _refusal(self, own: OwnInstance, record: InstanceRecord, body: AskForMove, now_ns: int) -> DealRefusal | None:
        source = self._ctx.view.record(body.source)
        if not _plausible(body) or body.source == own.instance or body.model != record.model:
            return DealRefusal.INVALID
        if own.draining:
            return DealRefusal.DRAINING
        if not self._ctx.fresh(own, now_ns):
            return DealRefusal.NOT_READY
        if body.plan_epoch != self._ctx.view.plan_epoch(record.model):
            return DealRefusal.STALE_PLAN
        if source is None or not compatible(source.kv, record.kv):
            return DealRefusal.INCOMPATIBLE
        if body.prompt_tokens + body.output_tokens >= record.max_model_len:
            return DealRefusal.TOO_LONG
        if len(own.incoming) >= self._ctx.limits.in_queue_max or len(own.bids) >= self._ctx.limits.bids_max:
            return DealRefusal.FULL
        return None

    def _bid(self, own: OwnInstance, record: InstanceRecord, body: AskForMove, now_ns: int) -> MoveBid | DealRefusal:
        snapshot, limits = own.snapshot, self._ctx.limits
        assert snapshot is not None
        idle = snapshot.blocks_free - own.promised_blocks - body.blocks - limits.growth_blocks
        batch = len(snapshot.running) + len(own.incoming)
        if idle < 0 or batch >= record.max_sequences:
            return DealRefusal.NO_ROOM
        if body.reason in _KEPT_OUT and self._risk_with(own, record, body) > self._ctx.config.memory.join_risk_max:
            return DealRefusal.NO_ROOM
        forecast = None
        if own.forecasts is not None and self._ctx.policy.needs_forecast:
            forecast = own.forecasts.join(snapshot, self._ctx.view.boundary(own.instance), now_ns, body)
        if forecast is not None and forecast.preemptions > 0 and body.reason in (MoveReason.BALANCE, MoveReason.MEMORY):
            return DealRefusal.NO_ROOM
        load = present_load(own)
        view = BurdenView(
            own=load,
            sequence=_movable(body),
            reason=body.reason,
            asker=self._ctx.view.load(body.source, now_ns),
            peers=self._ctx.view.peers(own.instance, now_ns),
            forecast=forecast,
        )
        own.bids[body.deal] = OpenBid(
            ask=body,
            until_ns=now_ns + limits.bid_ms * MS,
            tokens=body.prompt_tokens + body.output_tokens,
            blocks=body.blocks,
        )
        return MoveBid(
            deal=body.deal,
            sequence=body.sequence,
            epoch=body.epoch,
            source=body.source,
            bidder=own.instance,
            plan_epoch=body.plan_epoch,
            burden_ns=self._ctx.policy.burden(view, self._ctx.parameters),
            load_tokens=load.demand,
            blocks_idle=idle,
            rest_ns=forecast.rest_ns if forecast is not None else 0,
            preemptions=max(0, forecast.preemptions) if forecast is not None else 0,
            start_ms=self._start_ms(own),
            valid_ms=limits.bid_ms,
        )

    def _risk_with(self, own: OwnInstance, record: InstanceRecord, body: AskForMove) -> float:
        """Probability that memory runs short here if the sequence comes; not computed where it does not matter."""
        assert own.snapshot is not None
        memory = self._ctx.config.memory
        if memory.join_risk_max >= 1:
            return 0.0
        return shortage_risk(
            own.snapshot,
            block_size=record.block_size,
            horizon_ns=memory.join_horizon_ms * MS,
            promised_blocks=own.promised_blocks + body.blocks,
        )

    def _start_ms(self, own: OwnInstance) -> int:
        """Expected wait for a slot, ms: 0, or until those ahead are done, each taking as long as moves took lately."""
        waiting = len(own.incoming) - self._ctx.limits.in_max + 1
        return max(0, round(waiting * own.costs.duration_ns / self._ctx.limits.in_max / MS))


def _plausible(body: AskForMove) -> bool:
    counts = (body.output_tokens, body.blocks, body.moves, body.load_tokens, body.queued_tokens, body.stay_ns)
    if min(counts) < 0 or body.prompt_tokens < 1 or body.max_tokens < 1 or abs(body.gain_ns) >= TIME_MAX:
        return False
    lengths = (body.prompt_tokens, body.output_tokens, body.blocks, body.max_tokens)
    rest = body.rest_p50
    return max(lengths) < LENGTH_MAX and body.stay_ns < TIME_MAX and (rest is None or 0 < rest < LENGTH_MAX)


def _movable(body: AskForMove) -> MovableSequence:
    return MovableSequence(
        sequence=body.sequence,
        tokens=body.prompt_tokens + body.output_tokens,
        output_tokens=body.output_tokens,
        blocks=body.blocks,
        rest_p50=body.rest_p50,
        rest_p90=body.rest_p90,
    )
