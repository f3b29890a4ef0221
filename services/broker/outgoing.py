"""Deals away from our instances, from the first bid to the end of the migration. States: deals.py."""

from __future__ import annotations

from millrace.actor.effects import CancelTimer, Effect, Log, Publish, Reply, Request
from millrace.contracts.broker import (
    DealEnded,
    DealPostponed,
    DealQueued,
    DealRefusal,
    DealRefused,
    DealStarted,
    GrantDeal,
    MoveBid,
    MoveReason,
    NoBid,
    OfferDeal,
    WithdrawDeal,
)
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrateSequence, MigrationFinished, MigrationOutcome, MigrationReason
from millrace.contracts.observers import CandidateScore
from millrace.contracts.sequences import request_id_of
from millrace.policies.trading import BidView, PickView

from services.broker.asking import ASK
from services.broker.deals import DealEvent, DealState, OutgoingDeal
from services.broker.intents import movable_of
from services.broker.loads import present_load
from services.broker.state import MS, BrokerContext, OfferPause, OwnInstance

#: First parts of correlations.
OFFER, MOVE = "offer", "move"

#: A sequence that cannot move at once may take so long to begin.
BEGIN_MS = 1_000

#: A sequence that was to move and is not here for so long has moved or ended, though the migrator did not answer.
GONE_NS = 2_000 * MS

#: Why a migration is asked for, in the migrator's words.
REASONS = {MoveReason.DRAIN: MigrationReason.DRAIN, MoveReason.HANDOFF: MigrationReason.HANDOFF}

#: A bid's numbers beyond this are no numbers.
COUNT_MAX = 1 << 62


class OutgoingDeals:
    """Drives the deals of our instances' sequences."""

    def __init__(self, ctx: BrokerContext) -> None:
        self._ctx = ctx

    # bids

    def on_bid(self, own: OwnInstance, body: MoveBid | NoBid, now_ns: int) -> list[Effect]:
        """A candidate has answered; with the last one the bids are compared."""
        deal = own.outgoing.get(body.deal)
        if deal is None or deal.state is not DealState.ASKING or body.sequence != deal.sequence:
            self._ctx.metrics.refused["late_bid"] += 1
            return []
        answered = {bid.bidder for bid in deal.bids} | set(deal.declined)
        if body.bidder not in deal.asked or body.bidder in answered:
            self._ctx.metrics.refused["repeated_bid" if body.bidder in answered else "forged"] += 1
            return []
        self._take(deal, body)
        if len(deal.bids) + len(deal.declined) < len(deal.asked):
            return []
        return [CancelTimer(name=f"{ASK}/{deal.deal}"), *self.decide(own, deal, now_ns)]

    def _take(self, deal: OutgoingDeal, body: MoveBid | NoBid) -> None:
        if isinstance(body, NoBid):
            deal.declined[body.bidder] = body.reason
        elif not _plausible(body):
            self._ctx.metrics.refused["absurd"] += 1
            deal.declined[body.bidder] = DealRefusal.INVALID
        elif body.plan_epoch != self._ctx.view.plan_epoch(deal.ask.model):
            self._ctx.metrics.refused["stale_plan"] += 1
            deal.declined[body.bidder] = DealRefusal.STALE_PLAN
        else:
            deal.bids.append(body)

    def decide(self, own: OwnInstance, deal: OutgoingDeal, now_ns: int) -> list[Effect]:
        """The bids are in, or the time is over: the policy picks one, and it is offered the deal."""
        if deal.state is not DealState.ASKING:
            return []
        status = own.status(deal.sequence)
        if status is None:
            return self._close(own, deal, "ended", now_ns)
        if not deal.bids:
            return self._close(own, deal, "no_bids", now_ns)
        view = PickView(
            sequence=movable_of(status),
            reason=deal.reason,
            own=present_load(own),
            bids=tuple(self._bid_view(own, bid) for bid in deal.bids),
            gain_ns=deal.ask.gain_ns,
            stay_ns=deal.ask.stay_ns,
            cost_ns=own.costs.cost_ns,
        )
        decision = self._ctx.policy.pick(view, self._ctx.parameters)
        deal.why = decision.reason
        if decision.chosen is None or decision.chosen not in deal.asked:
            return self._close(own, deal, "stays", now_ns)
        return self._offer(own, deal, decision.chosen, decision.scores, now_ns)

    def _bid_view(self, own: OwnInstance, bid: MoveBid) -> BidView:
        return BidView(
            bidder=bid.bidder,
            burden_ns=bid.burden_ns,
            load_tokens=bid.load_tokens,
            blocks_idle=bid.blocks_idle,
            rest_ns=bid.rest_ns,
            preemptions=bid.preemptions,
            start_ms=bid.start_ms,
            same_machine=self._ctx.view.same_machine(own.instance, bid.bidder),
        )

    # offers and grants

    def _offer(
        self, own: OwnInstance, deal: OutgoingDeal, chosen: str, scores: list[CandidateScore], now_ns: int
    ) -> list[Effect]:
        deal.advance(DealEvent.CHOSEN)
        limits, ask = self._ctx.limits, deal.ask
        deal.target = chosen
        deal.hold_until_ns = now_ns + limits.hold_ms * MS
        deal.deadline_ns = now_ns + 2 * limits.offer_ms * MS
        body = OfferDeal(
            deal=deal.deal,
            sequence=ask.sequence,
            epoch=ask.epoch,
            source=own.instance,
            target=chosen,
            reason=ask.reason,
            plan_epoch=ask.plan_epoch,
            tokens=deal.tokens,
            blocks=ask.blocks,
            queued_tokens=own.queued_out_tokens,
            moves=ask.moves,
            why=deal.why,
            scores=scores,
            hold_ms=limits.hold_ms,
        )
        return [
            Request(
                subject=self._ctx.subjects.deal(chosen),
                body=body,
                correlation=f"{OFFER}/{deal.deal}",
                timeout_ns=limits.offer_ms * MS,
                request=request_id_of(ask.sequence),
            )
        ]

    def on_offer_answer(
        self, own: OwnInstance, deal: OutgoingDeal, body: Body | RequestFailure, now_ns: int
    ) -> list[Effect]:
        """The chosen bidder queues it, grants a slot at once, or does not want it any more."""
        if deal.state is not DealState.OFFERING:
            return []  # a grant overtook the answer
        match body:
            case DealQueued(granted=True):
                deal.advance(DealEvent.GRANT)
                deal.deadline_ns = now_ns + self._granted_ns(body.start_within_ms)
                return self._start_granted(own, now_ns)
            case DealQueued():
                deal.advance(DealEvent.QUEUE)
                return []
            case DealRefused():
                return self._close(own, deal, str(body.reason), now_ns)
            case _:
                return [*self._withdraw(deal, "no answer"), *self._close(own, deal, "unanswered", now_ns)]

    def on_grant(self, own: OwnInstance, body: GrantDeal, reply_to: str, now_ns: int) -> list[Effect]:
        """A slot of the target is free for it: it starts, or says that it cannot yet."""
        deal = own.outgoing.get(body.deal)
        if deal is None or deal.target != body.target or deal.sequence != body.sequence:
            return self._unknown(body, reply_to)
        if deal.state is DealState.MOVING:  # the grant was repeated
            return self._answer(reply_to, _started(deal), body.sequence)
        if deal.state is DealState.OFFERING:
            deal.advance(DealEvent.QUEUE)
        if not deal.advance(DealEvent.GRANT):
            return self._unknown(body, reply_to)
        deal.deadline_ns = now_ns + self._granted_ns(body.start_within_ms)
        deal.kept = body.starving
        if own.moving_out < self._ctx.limits.out_max:
            return [*self._answer(reply_to, _started(deal), body.sequence), *self._start(own, deal, now_ns)]
        if not deal.kept:
            deal.advance(DealEvent.POSTPONE)
        postponed = DealPostponed(deal=deal.deal, sequence=deal.sequence, epoch=deal.ask.epoch, outgoing=own.moving_out)
        return self._answer(reply_to, postponed, body.sequence)

    def _unknown(self, body: GrantDeal, reply_to: str) -> list[Effect]:
        self._ctx.metrics.refused["late_grant"] += 1
        answer = DealRefused(deal=body.deal, sequence=body.sequence, reason=DealRefusal.UNKNOWN)
        return self._answer(reply_to, answer, body.sequence)

    def _granted_ns(self, start_within_ms: int) -> int:
        """Time that a grant holds here: what it says, within our own bound."""
        return min(max(1, start_within_ms), self._ctx.limits.keep_ms) * MS

    def _answer(self, reply_to: str, body: Body, sequence: str) -> list[Effect]:
        return [Reply(to=reply_to, body=body, request=request_id_of(sequence))] if reply_to else []

    def _start_granted(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Starts what has a slot of its target, kept ones first, as far as we have slots."""
        granted = [deal for deal in own.outgoing.values() if deal.state is DealState.GRANTED]
        effects: list[Effect] = []
        for deal in sorted(granted, key=lambda each: not each.kept):
            if own.moving_out >= self._ctx.limits.out_max:
                break
            effects.append(self._tell(deal, _started(deal)))
            effects += self._start(own, deal, now_ns)
        return effects

    def _start(self, own: OwnInstance, deal: OutgoingDeal, now_ns: int) -> list[Effect]:
        deal.advance(DealEvent.START)
        deal.started_ns = now_ns
        body = MigrateSequence(
            sequence=deal.sequence,
            target=deal.target,
            reason=REASONS.get(deal.reason, MigrationReason.SCHEDULER),
            within_ms=BEGIN_MS,
            order=deal.deal,
            note=self._note(own, deal),
        )
        return [
            Request(
                subject=self._ctx.subjects.migrate(own.instance, "start"),
                body=body,
                correlation=f"{MOVE}/{deal.deal}",
                timeout_ns=self._ctx.limits.transfer_ms * MS,
                request=request_id_of(deal.sequence),
            )
        ]

    def _note(self, own: OwnInstance, deal: OutgoingDeal) -> str:
        """Human-readable reason of the move and of the choice of target; it is recorded in the migration's span."""
        stage, boundary, rest = (
            self._ctx.view.stage(own.instance),
            self._ctx.view.boundary(own.instance),
            deal.ask.rest_p50,
        )
        where = f" from stage {stage.name}" if stage is not None else ""
        where += f", which ends at {boundary}" if boundary is not None else ""
        expected = "its rest is unknown" if rest is None else f"{rest} tokens expected to come"
        expected += "" if deal.ask.rest_p90 is None else f" (90 %: {deal.ask.rest_p90} at most)"
        expected += _cause(own, deal)
        bids = [f"{bid.bidder} {bid.burden_ns / 1e9:.3g} s, {bid.load_tokens} tokens" for bid in deal.bids]
        bids += [f"{name} {why}" for name, why in deal.declined.items()]
        silent = len(deal.asked) - len(bids)
        told = "; ".join([*bids, *([f"{silent} silent"] if silent > 0 else [])])
        return f"{deal.reason}{where}: {deal.tokens} tokens, {expected}; asked {len(deal.asked)}: {told}; {deal.why}"

    # ends

    def on_move_answer(
        self, own: OwnInstance, deal: OutgoingDeal, body: Body | RequestFailure, now_ns: int
    ) -> list[Effect]:
        """The migration is over. Without an answer it is taken as lost: the next snapshot shows who has it."""
        if not deal.advance(DealEvent.FINISH):
            return []
        finished = body if isinstance(body, MigrationFinished) else None
        outcome = finished.outcome if finished is not None else MigrationOutcome.LOST
        moved = outcome is MigrationOutcome.MOVED
        if moved and finished is not None:
            own.costs.observe(frozen_ns=finished.frozen_ns, duration_ns=finished.duration_ns)
        if deal.reason is MoveReason.BALANCE:
            own.balanced_ns = now_ns
        ended = DealEnded(
            deal=deal.deal,
            sequence=deal.sequence,
            epoch=finished.epoch if finished is not None else deal.ask.epoch,
            source=own.instance,
            target=deal.target,
            outcome=outcome,
            moves=deal.ask.moves + (moved and deal.reason is MoveReason.BALANCE),
            refusal=finished.refusal if finished is not None else None,
            duration_ns=now_ns - deal.started_ns,
            detail=finished.detail if finished is not None else f"migrator: {body}"[:200],
        )
        how = str(outcome) if ended.refusal is None else str(ended.refusal)
        return [self._tell(deal, ended), *self._end(own, deal, how, now_ns), *self._start_granted(own, now_ns)]

    def expire(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Ends what is over by time, and what concerns sequences that are not there any more."""
        effects: list[Effect] = []
        for deal in list(own.outgoing.values()):
            gone = self._ctx.fresh(own, now_ns) and own.status(deal.sequence) is None
            late = now_ns >= deal.deadline_ns
            match deal.state:
                case DealState.MOVING:
                    deal.gone_ns = (deal.gone_ns or now_ns) if gone else 0
                    if gone and now_ns - deal.gone_ns >= GONE_NS:
                        effects += self.on_move_answer(own, deal, RequestFailure.TIMEOUT, now_ns)
                case _ if gone:
                    effects += [*self._withdraw(deal, "not running here"), *self._close(own, deal, "ended", now_ns)]
                case DealState.ASKING if late:
                    effects += self.decide(own, deal, now_ns)
                case DealState.GRANTED if late:
                    deal.kept = False
                    deal.advance(DealEvent.LAPSE)
                case DealState.QUEUED if now_ns >= deal.hold_until_ns:
                    effects += [*self._withdraw(deal, "waited too long"), *self._close(own, deal, "expired", now_ns)]
                case _:
                    pass
        own.rests = {name: rest for name, rest in own.rests.items() if now_ns < rest.until_ns or own.holds(name)}
        return effects

    def void(self, own: OwnInstance, why: str, now_ns: int) -> list[Effect]:
        """A new plan, or the bus was away: what has not started is given up; transfers go on."""
        effects: list[Effect] = []
        for deal in list(own.outgoing.values()):
            if deal.state is not DealState.MOVING:
                effects += [*self._withdraw(deal, why), *self._close(own, deal, why, now_ns, rests=False)]
        return effects

    def _close(
        self, own: OwnInstance, deal: OutgoingDeal, how: str, now_ns: int, *, rests: bool = True
    ) -> list[Effect]:
        """Nothing comes of it."""
        deal.advance(DealEvent.CLOSE)
        return self._end(own, deal, how, now_ns, rests=rests)

    def _end(self, own: OwnInstance, deal: OutgoingDeal, how: str, now_ns: int, *, rests: bool = True) -> list[Effect]:
        assert deal.state is DealState.ENDED, f"{deal.deal} ends while {deal.state}"
        del own.outgoing[deal.deal]
        self._ctx.metrics.deals[(str(deal.reason), how)] += 1
        if how == MigrationOutcome.MOVED:
            own.rests.pop(deal.sequence, None)
            own.left.add(deal.sequence)
        elif rests:
            self._rest(own, deal, now_ns)
        fields = {"deal": deal.deal, "sequence": deal.sequence, "source": own.instance, "target": deal.target}
        fields |= {"reason": str(deal.reason), "result": how, "why": deal.why}
        return [Log(level="debug", event="deal_ended", fields=fields, request=request_id_of(deal.sequence))]

    def _rest(self, own: OwnInstance, deal: OutgoingDeal, now_ns: int) -> None:
        """It is left alone for a while, twice as long each time; but a drain has a limit and does not wait longer."""
        before = own.rests.get(deal.sequence)
        refusals = before.refusals + 1 if before is not None else 1
        limits = self._ctx.limits
        doublings = 0 if deal.reason is MoveReason.DRAIN else min(refusals - 1, 20)
        span_ms = min(limits.rest_ms_max, limits.rest_ms << doublings)
        own.rests[deal.sequence] = OfferPause(
            now_ns + int(span_ms * MS * (1 - 0.25 * self._ctx.rng.random())), refusals
        )

    def _withdraw(self, deal: OutgoingDeal, why: str) -> list[Effect]:
        """Tells the target, where there is one."""
        if not deal.target:
            return []
        body = WithdrawDeal(
            deal=deal.deal,
            sequence=deal.sequence,
            epoch=deal.ask.epoch,
            source=deal.ask.source,
            target=deal.target,
            detail=why,
        )
        return [self._tell(deal, body)]

    def _tell(self, deal: OutgoingDeal, body: Body) -> Effect:
        subject = self._ctx.subjects.deal(deal.target)
        return Publish(subject=subject, body=body, request=request_id_of(deal.sequence))


def _cause(own: OwnInstance, deal: OutgoingDeal) -> str:
    """Risk or delay for which it shall leave; empty where it has to leave anyway."""
    if deal.reason is MoveReason.MEMORY:
        return f", KV memory short with a probability of {own.memory_risk:.0%}"
    return f", others end {deal.ask.gain_ns / 1e9:.3g} s sooner without it" if deal.ask.gain_ns > 0 else ""


def _started(deal: OutgoingDeal) -> DealStarted:
    ask = deal.ask
    return DealStarted(deal=ask.deal, sequence=ask.sequence, epoch=ask.epoch, source=ask.source, target=deal.target)


def _plausible(body: MoveBid) -> bool:
    counts = (body.load_tokens, body.blocks_idle, body.rest_ns, body.start_ms, body.valid_ms)
    return 0 <= min(counts) <= max(counts) < COUNT_MAX and abs(body.burden_ns) < COUNT_MAX
