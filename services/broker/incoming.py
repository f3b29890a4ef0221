"""Deals to our instances: who gets a slot when. States: deals.py.

Agreed sequences wait in a queue ordered by reason, then by how much their source wants to move, then by arrival. A slot
is granted for a time. A source that is too busy loses it to the next one; after several times a slot is kept for its
sequence, one at a time, while others go on with the rest of the slots.

Source: CascadeInfer, section 4.4. Differs in that the slot of a starving sequence is kept beside others that proceed:
the paper's receiver waits idle.
"""

from __future__ import annotations

from millrace.actor.effects import Effect, Reply, Request
from millrace.contracts.broker import (
    DealEnded,
    DealPostponed,
    DealQueued,
    DealRefusal,
    DealRefused,
    DealStarted,
    GrantDeal,
    MoveReason,
    OfferDeal,
    WithdrawDeal,
)
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrationOutcome
from millrace.contracts.sequences import request_id_of

from services.broker.deals import TIME_MAX, DealEvent, DealState, IncomingDeal, OpenBid
from services.broker.fences import MoveHistory
from services.broker.state import MS, BrokerContext, OwnInstance

#: First part of correlations.
GRANT = "grant"

#: A sequence whose source was too busy is not granted a slot again for so long.
POSTPONED_NS = 100 * MS

#: Deals that are over are remembered for so long, and no more of them than this: a late repeat is no new deal.
ENDED_NS, ENDED_MAX = 30_000 * MS, 1_024

#: A source that did not answer so often in a row has no broker that knows of the transfer: its slot is free.
UNCONFIRMED_MAX = 3


class IncomingDeals:
    """Takes offers and hands out slots of our instances."""

    def __init__(self, ctx: BrokerContext) -> None:
        self._ctx = ctx

    # offers

    def on_offer(self, own: OwnInstance, body: OfferDeal, reply_to: str, now_ns: int) -> list[Effect]:
        """A source takes a bid. Repeated, it is answered as the deal stands."""
        known = own.incoming.get(body.deal)
        if known is not None:
            same = known.offer.sequence == body.sequence and known.offer.source == body.source
            answer = self._standing(own, known) if same else _refused(body, DealRefusal.INVALID)
            return self._answer(reply_to, answer, body.sequence)
        bid = own.bids.pop(body.deal, None)
        refusal = self._offer_refusal(own, body, bid, now_ns)
        if refusal is not None:
            self._ctx.metrics.refused[f"offer_{refusal}"] += 1
            return self._answer(reply_to, _refused(body, refusal), body.sequence)
        hold_until_ns = now_ns + min(max(1, body.hold_ms), 2 * self._ctx.limits.hold_ms) * MS
        own.orders += 1
        deal = IncomingDeal(
            offer=body,
            order=own.orders,
            source_incarnation=self._ctx.view.broker_incarnation(body.source),
            until_ns=hold_until_ns,
            hold_until_ns=hold_until_ns,
        )
        own.incoming[body.deal] = deal
        if self._next(own, now_ns) is deal and own.slots_taken < self._ctx.limits.in_max:
            self._grant(own, deal, now_ns)
        return self._answer(reply_to, self._standing(own, deal), body.sequence)

    def _offer_refusal(self, own: OwnInstance, body: OfferDeal, bid: OpenBid | None, now_ns: int) -> DealRefusal | None:
        if body.deal in own.ended or bid is None or now_ns >= bid.until_ns:
            return DealRefusal.NO_BID
        ask = bid.ask
        if (ask.sequence, ask.epoch, ask.source) != (body.sequence, body.epoch, body.source):
            return DealRefusal.INVALID
        if (body.reason, body.moves, body.tokens, body.blocks) != (ask.reason, ask.moves, bid.tokens, bid.blocks):
            return DealRefusal.INVALID
        if not 0 <= body.queued_tokens < TIME_MAX:
            return DealRefusal.INVALID
        if any(deal.offer.sequence == body.sequence for deal in own.incoming.values()):
            return DealRefusal.INVALID
        if body.plan_epoch != self._ctx.view.plan_epoch(ask.model):
            return DealRefusal.STALE_PLAN
        if own.draining:
            return DealRefusal.DRAINING
        if len(own.incoming) >= self._ctx.limits.in_queue_max:
            return DealRefusal.FULL
        return None

    def _standing(self, own: OwnInstance, deal: IncomingDeal) -> DealQueued:
        waiting = sorted(each.rank for each in own.incoming.values() if each.state is DealState.QUEUED)
        return DealQueued(
            deal=deal.deal,
            sequence=deal.offer.sequence,
            epoch=deal.offer.epoch,
            granted=deal.slotted,
            position=1 + waiting.index(deal.rank) if deal.state is DealState.QUEUED else 0,
            start_within_ms=self._ctx.limits.start_ms if deal.slotted else 0,
        )

    def _answer(self, reply_to: str, body: Body, sequence: str) -> list[Effect]:
        return [Reply(to=reply_to, body=body, request=request_id_of(sequence))] if reply_to else []

    # slots

    def _next(self, own: OwnInstance, now_ns: int) -> IncomingDeal | None:
        """Deal that gets the next slot."""
        ready = [d for d in own.incoming.values() if d.state is DealState.QUEUED and now_ns >= d.not_before_ns]
        return min(ready, key=lambda deal: deal.rank, default=None)

    def _grant(self, own: OwnInstance, deal: IncomingDeal, now_ns: int) -> bool:
        """Gives it a slot; returns whether the slot is kept for it."""
        limits = self._ctx.limits
        kept = any(each.state is DealState.KEPT for each in own.incoming.values())
        keep = deal.attempts >= limits.starving_after and not kept
        deal.advance(DealEvent.KEEP if keep else DealEvent.GRANT)
        deal.until_ns = now_ns + (limits.keep_ms if keep else limits.start_ms) * MS
        self._ctx.metrics.starved += keep
        return keep

    def hand_out(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Grants what is free to who is next."""
        effects: list[Effect] = []
        while own.slots_taken < self._ctx.limits.in_max and (deal := self._next(own, now_ns)) is not None:
            starving = self._grant(own, deal, now_ns)
            effects.append(self._granted(deal, starving=starving))
        return effects

    def _granted(self, deal: IncomingDeal, *, starving: bool) -> Effect:
        limits, offer = self._ctx.limits, deal.offer
        body = GrantDeal(
            deal=deal.deal,
            sequence=offer.sequence,
            epoch=offer.epoch,
            source=offer.source,
            target=offer.target,
            start_within_ms=limits.keep_ms if starving else limits.start_ms,
            starving=starving,
        )
        return Request(
            subject=self._ctx.subjects.deal(offer.source),
            body=body,
            correlation=f"{GRANT}/{deal.deal}",
            timeout_ns=limits.offer_ms * MS,
            request=request_id_of(offer.sequence),
        )

    def on_grant_answer(
        self, own: OwnInstance, deal: IncomingDeal, body: Body | RequestFailure, now_ns: int
    ) -> list[Effect]:
        """The source starts it, cannot yet, or does not want it any more. Silence counts as being busy."""
        if deal.state is DealState.MOVING:
            self._on_confirmed(own, deal, body, now_ns)
            return self.hand_out(own, now_ns)
        match body:
            case DealStarted():
                self._start(deal, now_ns)
            case DealRefused():
                if deal.advance(DealEvent.CLOSE):
                    self._end(own, deal, now_ns)
            case DealPostponed() | RequestFailure() | _:
                self._postpone(deal, DealEvent.POSTPONE, now_ns)
        return self.hand_out(own, now_ns)

    def _on_confirmed(self, own: OwnInstance, deal: IncomingDeal, body: Body | RequestFailure, now_ns: int) -> None:
        """Whether a transfer goes on, by its source. Where not, the sequence may be here before a snapshot shows it."""
        if isinstance(body, DealStarted):
            deal.unconfirmed = 0
            return
        deal.unconfirmed += 1
        if isinstance(body, DealRefused) or deal.unconfirmed >= UNCONFIRMED_MAX:
            self._ctx.metrics.unheard_ends += 1
            deal.advance(DealEvent.CLOSE)
            self._arrived(own, deal, now_ns, duration_ns=0)
            self._end(own, deal, now_ns)

    def on_started(self, own: OwnInstance, body: DealStarted, now_ns: int) -> list[Effect]:
        """The source has used its slot."""
        deal = own.incoming.get(body.deal)
        if deal is None or deal.offer.sequence != body.sequence:
            self._ctx.metrics.refused["late_end"] += 1
            return []
        self._start(deal, now_ns)
        return []

    def _start(self, deal: IncomingDeal, now_ns: int) -> None:
        if deal.advance(DealEvent.START):
            deal.until_ns = now_ns + 2 * self._ctx.limits.transfer_ms * MS
            deal.confirm_ns = now_ns + self._ctx.limits.confirm_ms * MS

    def _postpone(self, deal: IncomingDeal, event: DealEvent, now_ns: int) -> None:
        was_kept = deal.state is DealState.KEPT
        if deal.advance(event) and not was_kept:
            deal.attempts += 1
            deal.not_before_ns = now_ns + POSTPONED_NS
            deal.until_ns = deal.hold_until_ns

    # ends

    def on_withdrawn(self, own: OwnInstance, body: WithdrawDeal, now_ns: int) -> list[Effect]:
        """The source does not want it any more."""
        deal = own.incoming.get(body.deal)
        if deal is None or deal.offer.sequence != body.sequence or not deal.advance(DealEvent.CLOSE):
            self._ctx.metrics.refused["late_end"] += own.bids.pop(body.deal, None) is None
            return []
        self._end(own, deal, now_ns)
        return self.hand_out(own, now_ns)

    def on_ended(self, own: OwnInstance, body: DealEnded, now_ns: int) -> list[Effect]:
        """The migration is over."""
        deal = own.incoming.get(body.deal)
        if deal is None or deal.offer.sequence != body.sequence or not deal.advance(DealEvent.FINISH):
            self._ctx.metrics.refused["late_end"] += 1
            return []
        came = body.outcome is MigrationOutcome.LOST and own.status(body.sequence) is not None
        if came or body.outcome is MigrationOutcome.MOVED:
            self._arrived(own, deal, now_ns, duration_ns=max(0, min(body.duration_ns, TIME_MAX)))
        self._end(own, deal, now_ns)
        return self.hand_out(own, now_ns)

    def _arrived(self, own: OwnInstance, deal: IncomingDeal, now_ns: int, *, duration_ns: int) -> None:
        offer = deal.offer
        moves = max(0, offer.moves) + (offer.reason is MoveReason.BALANCE)
        history = MoveHistory(balance_moves=moves, moved_ns=now_ns, tokens=offer.tokens, duration_ns=duration_ns)
        self._ctx.remember(own, offer.sequence, history)

    def expire(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Ends what is over by time; a transfer also when the sequence is here and nobody told its end, or when the
        source's broker was started anew: it will not tell. Asks about transfers that go on.
        """
        effects: list[Effect] = []
        for deal in list(own.incoming.values()):
            forgotten = deal.source_incarnation != self._ctx.view.broker_incarnation(deal.offer.source)
            match deal.state:
                case _ if forgotten:
                    deal.until_ns = now_ns
                    self._finish_silently(own, deal, now_ns)
                case DealState.GRANTED if now_ns >= deal.until_ns:
                    self._postpone(deal, DealEvent.LAPSE, now_ns)
                case DealState.QUEUED | DealState.KEPT if now_ns >= deal.until_ns:
                    deal.advance(DealEvent.CLOSE)
                    self._end(own, deal, now_ns)
                case DealState.MOVING if own.status(deal.offer.sequence) is not None:
                    deal.until_ns = min(deal.until_ns, now_ns + self._ctx.limits.keep_ms * MS)
                    self._finish_silently(own, deal, now_ns)
                case DealState.MOVING:
                    effects += self._confirm(deal, now_ns)
                    self._finish_silently(own, deal, now_ns)
                case _:
                    pass
        if own.bids:
            own.bids = {name: bid for name, bid in own.bids.items() if now_ns < bid.until_ns}
        while own.ended and now_ns - own.ended[oldest := next(iter(own.ended))] >= ENDED_NS:
            del own.ended[oldest]
        return effects + self.hand_out(own, now_ns)

    def _confirm(self, deal: IncomingDeal, now_ns: int) -> list[Effect]:
        """Repeats the grant of a transfer, which its source answers as the deal stands there."""
        if now_ns < deal.confirm_ns:
            return []
        deal.confirm_ns = now_ns + self._ctx.limits.confirm_ms * MS
        return [self._granted(deal, starving=False)]

    def _finish_silently(self, own: OwnInstance, deal: IncomingDeal, now_ns: int) -> None:
        if now_ns < deal.until_ns or not deal.advance(DealEvent.CLOSE):
            return
        if own.status(deal.offer.sequence) is not None:
            self._arrived(own, deal, now_ns, duration_ns=0)
        self._end(own, deal, now_ns)

    def void(self, own: OwnInstance, now_ns: int) -> None:
        """A new plan, or the bus was away: bids and what has not started are void; transfers go on."""
        own.bids.clear()
        for deal in list(own.incoming.values()):
            if deal.state is not DealState.MOVING and deal.advance(DealEvent.CLOSE):
                self._end(own, deal, now_ns)

    def _end(self, own: OwnInstance, deal: IncomingDeal, now_ns: int) -> None:
        del own.incoming[deal.deal]
        own.ended[deal.deal] = now_ns
        while len(own.ended) > ENDED_MAX:
            del own.ended[next(iter(own.ended))]


def _refused(body: OfferDeal, reason: DealRefusal) -> DealRefused:
    return DealRefused(deal=body.deal, sequence=body.sequence, reason=reason)
