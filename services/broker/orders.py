"""Moves and evacuations that somebody asks for: who waits, until when, and what is answered."""

from __future__ import annotations

from collections import Counter

from millrace.actor.effects import Effect, Reply
from millrace.contracts.broker import BidRefusal, MoveReason
from millrace.contracts.kv import KvRefusal, compatible
from millrace.contracts.message import Body
from millrace.contracts.migration import (
    EvacuateInstance,
    InstanceEvacuated,
    MigrateSequence,
    MigrationFinished,
    MigrationMode,
    MigrationOutcome,
)
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import SequenceStatus

from services.broker.asks import Asks
from services.broker.intents import Intent, can_move
from services.broker.state import MS, BrokerContext, Evacuation, MoveOrder, OutgoingAsk, OwnInstance

#: Orders of an instance that wait; further ones are refused TOO_MANY. Askers of one: what is repeated.
ORDERS_MAX, WAITERS_MAX = 256, 32

#: A sequence that no snapshot of this long after the order shows is not here.
SEEN_NS = 300 * MS

#: A sequence that cannot move yet, or got no answer, is tried again after this.
RETRY_NS = 100 * MS

#: An evacuation begins from a snapshot not older than itself; where none comes in this time, from the last one.
SNAPSHOT_NS = 600 * MS

#: A bidder's refusal as an asker of a move is answered.
_BID_REFUSALS = {
    BidRefusal.NO_ROOM: KvRefusal.NO_BLOCKS,
    BidRefusal.FULL: KvRefusal.TOO_MANY,
    BidRefusal.DRAINING: KvRefusal.TARGET_REFUSED,
    BidRefusal.INCOMPATIBLE: KvRefusal.INCOMPATIBLE,
    BidRefusal.TOO_LONG: KvRefusal.TARGET_REFUSED,
}

Refusal = tuple[KvRefusal, str]


class Orders:
    """Carries out what operators, workers and other services ask of our instances."""

    def __init__(self, ctx: BrokerContext, asks: Asks) -> None:
        self._ctx = ctx
        self._asks = asks

    # single moves

    def on_move(self, own: OwnInstance, body: MigrateSequence, reply_to: str, now_ns: int) -> list[Effect]:
        """Somebody wants a sequence moved."""
        waiters = [reply_to] if reply_to else []
        known = own.orders.get(body.sequence)
        refused = self._contradiction(own, known, body) or self._forbidden(own, body)
        if refused is not None:
            order = MoveOrder(body=body, at_ns=now_ns, until_ns=now_ns, waiters=waiters)
            return self._close(own, order, refused)
        if known is not None:
            known.waiters += waiters
            return []
        until_ns = now_ns + max(0, body.within_ms) * MS
        own.orders[body.sequence] = MoveOrder(body=body, at_ns=now_ns, until_ns=until_ns, waiters=waiters)
        return self.look(own, now_ns)

    def _contradiction(self, own: OwnInstance, known: MoveOrder | None, body: MigrateSequence) -> Refusal | None:
        moving = next((ask for ask in own.asks.values() if ask.sequence == body.sequence and ask.moving), None)
        if moving is not None and body.target not in ("", moving.target):
            return KvRefusal.INVALID, f"moves to {moving.target}"
        if known is not None and body.target not in ("", known.body.target):
            return KvRefusal.INVALID, f"is to move to {known.body.target or 'wherever there is room'}"
        if known is not None and len(known.waiters) >= WAITERS_MAX:
            return KvRefusal.TOO_MANY, f"{WAITERS_MAX} wait for it already"
        if known is None and len(own.orders) >= ORDERS_MAX:
            return KvRefusal.TOO_MANY, f"{ORDERS_MAX} orders wait"
        return None

    def _forbidden(self, own: OwnInstance, body: MigrateSequence) -> Refusal | None:
        """Reason not to try it at all."""
        source, target = self._ctx.view.record(own.instance), self._ctx.view.record(body.target)
        if source is None:
            return KvRefusal.UNABLE, f"{own.instance} is not registered"
        if source.kv is None and body.mode is not MigrationMode.RECOMPUTE:
            return KvRefusal.UNABLE, source.kv_refusal or f"{own.instance} moves nothing"
        if not body.target:
            return None
        if body.target == own.instance:
            return KvRefusal.INVALID, "source and target are the same"
        if target is None:
            return KvRefusal.NO_TARGET, f"{body.target} is not registered"
        if target.model != source.model:
            return KvRefusal.INCOMPATIBLE, f"{body.target} serves {target.model}"
        if body.mode is not MigrationMode.RECOMPUTE and not compatible(source.kv, target.kv):
            return KvRefusal.INCOMPATIBLE, target.kv_refusal or f"KV of {body.target} is of another kind"
        return None

    def look(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Asks for what may move now, answers what cannot, and ends an evacuation that has nothing left to do."""
        effects: list[Effect] = []
        for order in list(own.orders.values()):
            effects += self._look_at(own, order, now_ns)
        if own.evacuation is not None and self._is_done(own, own.evacuation, now_ns):
            effects += self.end_evacuation(own, now_ns)
        return effects

    def _look_at(self, own: OwnInstance, order: MoveOrder, now_ns: int) -> list[Effect]:
        sequence, record = order.body.sequence, self._ctx.view.record(own.instance)
        if sequence in own.taken or now_ns < order.again_ns:
            return []
        status = own.status(sequence)
        if status is not None and status.immovable:
            return self._close(own, order, (KvRefusal.IMMOVABLE, status.immovable))
        if record is None or not self._ctx.fresh(own, now_ns):
            late = now_ns >= max(order.until_ns, order.at_ns + SNAPSHOT_NS)
            return self._close(own, order, (KvRefusal.UNABLE, "no fresh snapshot")) if late else []
        if not own.holds(sequence) or sequence in own.sequences.left:
            seen = own.heard_ns > order.at_ns and now_ns - order.at_ns >= SEEN_NS
            return self._close(own, order, (KvRefusal.UNKNOWN_SEQUENCE, "")) if seen else []
        if status is None or not can_move(status):
            refused = (KvRefusal.NOT_RUNNING, "it waits, or its prompt is not done")
            return self._close(own, order, refused) if now_ns >= order.until_ns else []
        intent = Intent(
            status, MoveReason.ORDER, target=order.body.target, mode=order.body.mode, note=order.body.note or "ordered"
        )
        effects = self._asks.ask(own, record, intent, now_ns)
        if not effects and sequence not in own.taken and self._asks.room(own) > 0:
            return self._close(own, order, (KvRefusal.NO_TARGET, "no other instance may take it"))
        return effects

    def on_ended(self, own: OwnInstance, ask: OutgoingAsk, now_ns: int) -> list[Effect]:
        """An ask has ended: whoever waits for that sequence hears so."""
        order, body = own.orders.get(ask.sequence), ask.finished
        if order is None:
            return []
        if body is None and ask.started_ns:
            lost = MigrationOutcome.LOST
            return self._close(own, order, (KvRefusal.UNANSWERED, "the migrator did not answer"), outcome=lost)
        if body is None:
            heard = {name: ask.declined.get(name) or f"bid, but {ask.why}" for name in (*ask.declined, *ask.bids)}
            if heard.keys() < set(ask.asked) and now_ns < order.until_ns:  # bidders may have much to do
                order.again_ns = now_ns + RETRY_NS
                return []
            refusals = [each for each in ask.declined.values() if isinstance(each, BidRefusal)]
            reason = _BID_REFUSALS.get(refusals[0], KvRefusal.NO_TARGET) if refusals else KvRefusal.UNANSWERED
            detail = ", ".join(f"{name}: {heard.get(name, 'no answer')}" for name in ask.asked)
            known = reason if order.body.target or not refusals else KvRefusal.NO_TARGET
            return self._close(own, order, (known, detail))
        if body.refusal is KvRefusal.NOT_RUNNING and now_ns < order.until_ns:
            order.again_ns = now_ns + RETRY_NS
            return []
        del own.orders[ask.sequence]
        return _answers(order.waiters, body, ask.sequence)

    def _close(
        self,
        own: OwnInstance,
        order: MoveOrder,
        refused: Refusal,
        *,
        outcome: MigrationOutcome = MigrationOutcome.REFUSED,
    ) -> list[Effect]:
        """Answers that an order is refused or lost, and forgets it if it was taken."""
        if own.orders.get(order.body.sequence) is order:
            del own.orders[order.body.sequence]
        record = self._ctx.view.record(own.instance)
        body = MigrationFinished(
            migration="",
            sequence=order.body.sequence,
            model=record.model if record is not None else "",
            source=own.instance,
            target=order.body.target,
            outcome=outcome,
            reason=MoveReason.ORDER,
            epoch=-1,
            refusal=refused[0],
            detail=refused[1],
            mode=order.body.mode or MigrationMode.LIVE,
            note=order.body.note,
        )
        return _answers(order.waiters, body, order.body.sequence)

    # evacuations

    def on_evacuate(self, own: OwnInstance, body: EvacuateInstance, reply_to: str, now_ns: int) -> list[Effect]:
        """Everything shall leave the instance; a second asker waits with the first."""
        until_ns, waiters = now_ns + max(0, body.limit_ms) * MS, [reply_to] if reply_to else []
        if own.evacuation is None:
            own.evacuation = Evacuation(since_ns=now_ns, until_ns=until_ns, waiters=waiters)
            own.sequences.rests.clear()
        else:
            own.evacuation.until_ns = max(own.evacuation.until_ns, until_ns)
            own.evacuation.waiters += waiters[: WAITERS_MAX - len(own.evacuation.waiters)]
        return self.look(own, now_ns)

    def _is_done(self, own: OwnInstance, evacuation: Evacuation, now_ns: int) -> bool:
        if now_ns >= evacuation.until_ns:
            return True
        if not self._ctx.view.has_others(own.instance):
            return True  # there is nowhere to go
        if own.heard_ns <= evacuation.since_ns:
            return now_ns - evacuation.since_ns >= SNAPSHOT_NS
        if MoveReason.DRAIN not in self._ctx.config.trading.reasons:
            return True
        return not own.asks and all(self._asks.stays_because(own, status) for status in self._left(own))

    def _left(self, own: OwnInstance) -> list[SequenceStatus]:
        """Sequences that are still there, as far as the last snapshot and moves since tell."""
        waiting = own.snapshot.waiting if own.snapshot is not None else []
        return [each for each in (*own.running(), *waiting) if each.sequence not in own.sequences.left]

    def end_evacuation(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Answers who asked for it, with what is left and why."""
        evacuation = own.evacuation
        assert evacuation is not None
        left: Counter[str] = Counter()
        elsewhere = self._ctx.view.has_others(own.instance)
        for status in self._left(own):
            why = "" if status.sequence in own.taken else self._asks.stays_because(own, status)
            if not elsewhere:
                why = "no other instance serves the model"
            elif not why:
                last = evacuation.refusals.get(status.sequence, "")
                why = f"not taken: {last}" if last else "the limit was reached first"
            left[why] += 1
        own.evacuation = None
        answer = InstanceEvacuated(
            instance=own.instance, moved=evacuation.moved, failed=evacuation.failed, left=dict(left)
        )
        return [Reply(to=to, body=answer) for to in evacuation.waiters]

    def abandon(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """This process ends: nobody waits in vain."""
        effects: list[Effect] = []
        for order in list(own.orders.values()):
            effects += self._close(own, order, (KvRefusal.CANCELLED, "the broker stops"))
        return effects + (self.end_evacuation(own, now_ns) if own.evacuation is not None else [])


def _answers(waiters: list[str], body: Body, sequence: str) -> list[Effect]:
    return [Reply(to=to, body=body, request=request_id_of(sequence)) for to in waiters]
