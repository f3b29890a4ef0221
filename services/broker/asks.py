"""Decides what leaves our instances, and where to: intents, asks, awards, ends. States: state.py."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.actor.effects import CancelTimer, Effect, Log, Publish, Request, StartTimer
from millrace.contracts.broker import AskForMove, BidRefusal, MoveBid, MoveReason
from millrace.contracts.kv import KvRefusal
from millrace.contracts.local import RequestFailure
from millrace.contracts.message import Body
from millrace.contracts.migration import MigrationFinished, MigrationOutcome, MoveSequence
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import InstanceRecord, SequenceStatus
from millrace.enginemodel.forecast.question import LeaveForecast
from millrace.policies.trading import BidView, LoadView, MovableSequence, PickDecision, PickView, TriggerView
from millrace.policies.trading.view import lightest

from services.broker.estimates import estimated_bids
from services.broker.intents import (
    Intent,
    IntentView,
    SequencesOnDemand,
    longest_rest_of,
    movable,
    movable_of,
    past_boundary,
    rest_of,
    standing_intents,
)
from services.broker.loads import present_load
from services.broker.shortage import shortage_risk
from services.broker.state import (
    ASKS,
    MS,
    NEVER_MOVED,
    AskEvent,
    AskPause,
    AskReaction,
    AskState,
    BrokerContext,
    OutgoingAsk,
    OwnInstance,
)

#: Instances that one ask goes to: of twice as many drawn at random those that carry least.
CANDIDATES_MAX = 3

#: How long bids are waited for: two engine steps of a busy machine, while a bid takes a millisecond.
ASK_MS = 50

#: The same for an order, within its own time: brokers of a full machine answer in a second.
ORDER_ASK_MS = 1_000

#: Idle blocks wanted beyond those that a sequence has.
GROWTH_BLOCKS = 4

#: Intents that are looked at in one tick: most of the rest would meet the same full targets.
LOOKED_AT_MAX = 16

#: A move may take so long.
TRANSFER_NS = 30_000 * MS

#: A sequence that was to move and is not here for so long has moved or ended, though the migrator did not answer.
GONE_NS = 2_000 * MS

#: First and longest pause before what no instance took is offered again; each is twice as long as the one before. A
#: drain has a limit and always waits the first one.
REST_MS, REST_MS_MAX = 250, 4_000

#: The same for balance as a whole, where asking was in vain: loads change in seconds.
BALANCE_REST_MS, BALANCE_REST_MS_MAX = 1_000, 16_000

#: No further balance move for so long after one: loads must show it first.
BALANCE_PAUSE_MS = 1_000

#: Slots are free again soon, and no load shows it.
SLOT_REST_MS = 100

#: First parts of timers and correlations.
ASK, MOVE = "ask", "move"

#: Refusals of a target, not of the sequence: another bid may be awarded.
ELSEWHERE = frozenset(
    {
        KvRefusal.NO_BLOCKS,
        KvRefusal.TOO_MANY,
        KvRefusal.NO_BID,
        KvRefusal.NO_TARGET,
        KvRefusal.INCOMPATIBLE,
        KvRefusal.UNABLE,
        KvRefusal.TARGET_REFUSED,
        KvRefusal.UNANSWERED,
    }
)


class Asks:
    """Decides what leaves our instances, and drives it to the end.

    Attributes:
        ended: Asks that ended with the last message; taken by the actor.
    """

    def __init__(self, ctx: BrokerContext) -> None:
        self._ctx = ctx
        self.ended: list[tuple[OwnInstance, OutgoingAsk]] = []

    # intents

    def look(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Asks for what should leave now, within the bounds, and notes why nothing does."""
        record = self._ctx.view.record(own.instance)
        if record is None or not self._ctx.fresh(own, now_ns):
            own.load.why = "no fresh snapshot of the instance"
            return []
        own.load.memory_risk = self._risk(own, record)
        view = self._view(own, now_ns)
        standing = standing_intents(view, self._ctx.fences)
        if standing:
            return self._ask_standing(own, record, standing, now_ns)
        if now_ns - self._ctx.plan_ns.get(record.model, 0) < self._ctx.fences.plan_pause_ms * MS:
            own.load.why = "a new plan: nothing balances yet"
            return []
        memory = self._memory(own, record, view, now_ns) if MoveReason.MEMORY in view.reasons else []
        return memory or self._balance(own, record, view, now_ns)

    def look_leaving(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Asks for what has to leave, and no more."""
        record = self._ctx.view.record(own.instance)
        if record is None or not self._ctx.fresh(own, now_ns):
            return []
        return self._ask_standing(own, record, standing_intents(self._view(own, now_ns), self._ctx.fences), now_ns)

    def _risk(self, own: OwnInstance, record: InstanceRecord) -> float:
        assert own.snapshot is not None
        return shortage_risk(
            own.snapshot,
            record,
            horizon_ns=max(3 * round(own.costs.duration_ns), self._ctx.config.memory.horizon_ms * MS),
            promised_blocks=own.promised_blocks,
        )

    def _view(self, own: OwnInstance, now_ns: int) -> IntentView:
        assert own.snapshot is not None
        boundary, notes = self._ctx.view.boundary(own.instance), own.sequences
        notes.past_ns = past_boundary(own.running(), boundary, notes.past_ns, now_ns)
        return IntentView(
            sequences=own.running(),
            role=self._ctx.view.role(own.instance),
            draining=own.draining,
            boundary=boundary,
            reasons=self._ctx.config.trading.reasons,
            histories=notes.histories,
            past_ns=notes.past_ns,
            arriving=own.arriving,
            step_ns=own.snapshot.step_duration_ns,
            move_ns=round(own.costs.duration_ns),
            now_ns=now_ns,
        )

    def _ask_standing(
        self, own: OwnInstance, record: InstanceRecord, intents: list[Intent], now_ns: int
    ) -> list[Effect]:
        """Asks for what has to leave: drains, hand-offs, boundaries."""
        effects: list[Effect] = []
        looked_at = resting = 0
        for intent in intents:
            if looked_at >= LOOKED_AT_MAX or self.room(own) <= 0:
                break
            sequence = intent.status.sequence
            if sequence in own.taken or sequence in own.sequences.left:
                continue
            if self._rests(own, sequence, now_ns) or self._gave_up(own, intent):
                resting += 1
                continue
            looked_at += 1
            effects += self.ask(own, record, intent, now_ns)
        if intents:
            reason, left = intents[0].reason, len(intents) - len(own.asks)
            own.load.why = f"{reason}: {len(own.asks)} of {len(intents)} are asked for or move"
            if left > 0 and resting:
                own.load.why += f"; {resting} wait until an instance may have room"
            elif left > 0 and self.room(own) > 0:
                own.load.why += "; no instance may take the others"
        return effects

    def _gave_up(self, own: OwnInstance, intent: Intent) -> bool:
        """Whether a drain leaves it: it cannot move, or has failed too often."""
        return intent.reason is MoveReason.DRAIN and bool(self.stays_because(own, intent.status))

    def stays_because(self, own: OwnInstance, status: SequenceStatus) -> str:
        """Reason for which an evacuation does not try to move a sequence; empty where it does."""
        if status.immovable:
            return f"cannot move: {status.immovable}"
        if own.evacuation is None:
            return ""
        if own.evacuation.failures.get(status.sequence, 0) >= FAILURES_MAX:
            return f"failed {FAILURES_MAX} times: {own.evacuation.refusals.get(status.sequence, '')}"
        return ""

    def room(self, own: OwnInstance) -> int:
        """Number of sequences that may still be asked for or moved."""
        return self._ctx.out_max(own) - len(own.asks)

    def _rests(self, own: OwnInstance, sequence: str, now_ns: int) -> bool:
        rest = own.sequences.rests.get(sequence)
        return rest is not None and now_ns < rest.until_ns

    # memory and balance

    def _memory(self, own: OwnInstance, record: InstanceRecord, view: IntentView, now_ns: int) -> list[Effect]:
        """Memory may run short before a move could help: asks for the sequence that holds most for longest."""
        at_risk = own.load.memory_risk > self._ctx.config.memory.risk_max
        if not at_risk or any(ask.reason is MoveReason.MEMORY for ask in own.asks.values()):
            return []
        able = self._able(own, view, MoveReason.MEMORY, now_ns)
        own.load.why = f"memory: short with a probability of {own.load.memory_risk:.0%}, {len(able)} may leave"
        first = min(able, key=lambda each: (-each.blocks * (each.rest_p50 or 1), each.sequence), default=None)
        status = own.status(first.sequence) if first is not None else None
        return self.ask(own, record, Intent(status, MoveReason.MEMORY), now_ns) if status is not None else []

    def _balance(self, own: OwnInstance, record: InstanceRecord, view: IntentView, now_ns: int) -> list[Effect]:
        """Asks for a move that the policy offers and that would gain something by the loads heard; one at a time, and
        not before loads show the last one.
        """
        if MoveReason.BALANCE not in view.reasons:
            own.load.why = "balance is off"
            return []
        able = SequencesOnDemand(lambda: self._able(own, view, MoveReason.BALANCE, now_ns))
        peers = self._ctx.view.peers(own.instance, now_ns)
        question = TriggerView(own=present_load(own), peers=peers, sequences=able)
        policy, balance = self._ctx.policy, own.balance
        answer, balance.policy = policy.trigger(question, self._ctx.parameters, balance.policy, now_ns)
        if any(ask.reason is MoveReason.BALANCE for ask in own.asks.values()):
            return []
        if not answer.offers:
            own.load.why = f"balance: nothing offered ({answer.reason})"
            return []
        if balance.rest is not None and now_ns < balance.rest.until_ns:
            return []
        if now_ns - balance.ended_ns < BALANCE_PAUSE_MS * MS:
            own.load.why = "balance: waits until loads show the last move"
            return []
        offers: list[tuple[LeaveForecast | None, str]] = [(None, sequence) for sequence in answer.offers]
        ordered = self._by_gain(own, list(answer.offers), now_ns) if policy.needs_forecast else offers
        for leave, sequence in ordered:
            status = own.status(sequence)
            if status is None or (leave is not None and leave.relieved_ns <= 0):
                continue
            intent = Intent(status, MoveReason.BALANCE)
            return self.ask(own, record, intent, now_ns, leave=leave, why=answer.reason)
        self._rest_balance(own, "no sequence's leaving would relieve the others", now_ns)
        return []

    def _able(self, own: OwnInstance, view: IntentView, reason: MoveReason, now_ns: int) -> list[MovableSequence]:
        notes = own.sequences
        taken = own.taken | notes.left | {name for name in notes.rests if self._rests(own, name, now_ns)}
        return movable(view, reason, taken, self._ctx.fences)

    def _by_gain(self, own: OwnInstance, sequences: list[str], now_ns: int) -> list[tuple[LeaveForecast | None, str]]:
        """Sequences by what the others gain if each leaves, most first; those without a forecast are left out."""
        forecast = [(leave, name) for name in sequences if (leave := self._leave(own, name, now_ns)) is not None]
        return [(leave, name) for leave, name in sorted(forecast, key=lambda pair: (-pair[0].relieved_ns, pair[1]))]

    def _leave(self, own: OwnInstance, sequence: str, now_ns: int) -> LeaveForecast | None:
        if own.forecasts is None or own.snapshot is None:
            return None
        return own.forecasts.leave(own.snapshot, self._ctx.view.boundary(own.instance), now_ns, sequence)

    # the ask

    def ask(
        self,
        own: OwnInstance,
        record: InstanceRecord,
        intent: Intent,
        now_ns: int,
        *,
        leave: LeaveForecast | None = None,
        why: str = "",
    ) -> list[Effect]:
        """Asks a few candidates; nobody where there is none, or where by the loads heard nothing would be gained."""
        status = intent.status
        targets = self._targets(own, intent, now_ns)
        if not targets or self.room(own) <= 0:
            return []
        if leave is None and self._ctx.policy.needs_forecast:
            leave = self._leave(own, status.sequence, now_ns)
        body = self._body(own, record, intent, self._within_ms(own, intent, now_ns), why or self._cause(own, intent))
        ask = OutgoingAsk(
            body=body,
            asked=tuple(load.name for load in targets),
            deadline_ns=now_ns + body.within_ms * MS,
            mode=intent.mode,
            gain_ns=leave.relieved_ns if leave is not None else 0,
            stay_ns=leave.rest_ns if leave is not None else 0,
        )
        if intent.reason is MoveReason.BALANCE:
            expected = self._pick(own, ask, status, estimated_bids(self._ctx, own, ask, leave, targets))
            if expected.chosen is None:
                self._rest_balance(own, f"{status.sequence} {expected.reason}", now_ns)
                return []
        own.asks[body.ask] = ask
        own.load.why = f"{intent.reason}: asks {', '.join(ask.asked)} to take {status.sequence}"
        self._ctx.metrics.asks.add(str(intent.reason))
        subjects, request = self._ctx.subjects, request_id_of(body.sequence)
        asks = [Publish(subject=subjects.ask(record.model, name), body=body, request=request) for name in ask.asked]
        return [*asks, StartTimer(name=f"{ASK}/{body.ask}", at_ns=ask.deadline_ns)]

    def _targets(self, own: OwnInstance, intent: Intent, now_ns: int) -> list[LoadView]:
        if intent.target:
            return [LoadView(name=intent.target, tokens=0)]
        status = intent.status
        length, blocks = status.prompt_tokens + status.output_tokens, status.blocks + GROWTH_BLOCKS
        found = list(
            self._ctx.view.targets(
                own.instance, intent.reason, length, now_ns, blocks=blocks, recompute=intent.recompute
            )
        )
        # Few tokens may fill every place of a batch.
        found = [load for load in found if self._has_place(load)] or found
        if len(found) > CANDIDATES_MAX:
            found = self._ctx.rng.sample(found, min(len(found), 2 * CANDIDATES_MAX))
        return lightest(found, blocks=blocks, count=CANDIDATES_MAX)

    def _has_place(self, load: LoadView) -> bool:
        record = self._ctx.view.record(load.name)
        return record is None or load.running < record.max_sequences

    def _cause(self, own: OwnInstance, intent: Intent) -> str:
        """Reason for which it shall leave, in a sentence."""
        tokens = intent.status.prompt_tokens + intent.status.output_tokens
        match intent.reason:
            case MoveReason.BOUNDARY:
                stage, boundary = self._ctx.view.stage(own.instance), self._ctx.view.boundary(own.instance)
                return f"{tokens} tokens, stage {stage.name if stage is not None else '?'} ends at {boundary}"
            case MoveReason.MEMORY:
                return f"KV memory short with a probability of {own.load.memory_risk:.0%}"
            case MoveReason.HANDOFF:
                return f"its prompt of {intent.status.prompt_tokens} tokens is done, {own.instance} only prefills"
            case MoveReason.DRAIN:
                return f"{own.instance} is to be emptied"
            case _:
                return intent.note

    def _within_ms(self, own: OwnInstance, intent: Intent, now_ns: int) -> int:
        order = own.orders.get(intent.status.sequence) if intent.reason is MoveReason.ORDER else None
        return ASK_MS if order is None else max(ASK_MS, min(ORDER_ASK_MS, (order.until_ns - now_ns) // MS))

    def _body(self, own: OwnInstance, record: InstanceRecord, intent: Intent, within_ms: int, why: str) -> AskForMove:
        status = intent.status
        history = own.sequences.histories.get(status.sequence, NEVER_MOVED)
        return AskForMove(
            ask=f"{self._ctx.rng.getrandbits(64):016x}",
            sequence=status.sequence,
            model=record.model,
            source=own.instance,
            reason=intent.reason,
            plan_epoch=self._ctx.view.plan_epoch(record.model),
            prompt_tokens=status.prompt_tokens,
            output_tokens=status.output_tokens,
            blocks=status.blocks,
            max_tokens=status.max_tokens,
            rest_p50=rest_of(status),
            rest_p90=longest_rest_of(status),
            moves=history.balance_moves,
            recompute=intent.recompute,
            within_ms=within_ms,
            why=why,
        )

    # bids

    def on_bid(self, own: OwnInstance, body: MoveBid, now_ns: int) -> list[Effect]:
        """A candidate has answered; with the last one the bids are compared."""
        ask = own.asks.get(body.ask)
        if ask is None or ask.state is not AskState.ASKING or body.sequence != ask.sequence:
            self._ctx.metrics.refused.add("late_bid")
            return []
        answered = ask.bids.keys() | ask.declined.keys()
        if body.bidder not in ask.asked or body.bidder in answered:
            self._ctx.metrics.refused.add("repeated_bid" if body.bidder in answered else "unasked_bid")
            return []
        refusal = self._wrong_with(ask, body)
        if refusal is None:
            ask.bids[body.bidder] = (body, now_ns + body.valid_ms * MS)
        else:
            ask.declined[body.bidder] = refusal
        if len(ask.bids) + len(ask.declined) < len(ask.asked):
            soon_ns = now_ns + ASK_MS * MS
            if refusal is not None or ask.deadline_ns <= soon_ns:
                return []
            ask.deadline_ns = soon_ns  # an order's: its first bid does not hold until the last could come
            return [StartTimer(name=f"{ASK}/{ask.ask}", at_ns=soon_ns)]
        return [CancelTimer(name=f"{ASK}/{ask.ask}"), *self.decide(own, ask, now_ns)]

    def _wrong_with(self, ask: OutgoingAsk, body: MoveBid) -> BidRefusal | None:
        if body.refusal is not None:
            return body.refusal
        if body.plan_epoch != self._ctx.view.plan_epoch(ask.body.model):
            self._ctx.metrics.refused.add("stale_plan")
            return BidRefusal.STALE_PLAN
        return None

    def decide(self, own: OwnInstance, ask: OutgoingAsk, now_ns: int) -> list[Effect]:
        """The bids are in, or the time is over: the policy picks one, which is awarded."""
        if ask.state is not AskState.ASKING:
            return []
        if own.status(ask.sequence) is None:
            return self._fire(own, ask, AskEvent.GONE, "ended", now_ns)
        if not self._choose(own, ask, now_ns):
            return self._fire(own, ask, AskEvent.DECLINED, "stays" if ask.bids else "no_bids", now_ns)
        return self._fire(own, ask, AskEvent.CHOSEN, "", now_ns)

    def _choose(self, own: OwnInstance, ask: OutgoingAsk, now_ns: int) -> bool:
        """Picks a bid that holds; whether there is one that may be awarded."""
        status = own.status(ask.sequence)
        bids = [self._bid_view(own, bid) for bid in ask.open_bids(now_ns) if bid.bidder not in ask.declined]
        if status is None or not bids:
            return False
        decision = self._pick(own, ask, status, bids)
        ask.why, ask.target = decision.reason, decision.chosen or ""
        return ask.target in {bid.bidder for bid in bids}

    def _pick(
        self, own: OwnInstance, ask: OutgoingAsk, status: SequenceStatus, bids: Iterable[BidView]
    ) -> PickDecision:
        view = PickView(
            sequence=movable_of(status),
            reason=ask.reason,
            own=present_load(own),
            bids=tuple(bids),
            gain_ns=ask.gain_ns,
            stay_ns=ask.stay_ns,
            cost_ns=own.costs.cost_ns,
        )
        return self._ctx.policy.pick(view, self._ctx.parameters)

    def _bid_view(self, own: OwnInstance, bid: MoveBid) -> BidView:
        return BidView(
            bidder=bid.bidder,
            burden_ns=bid.burden_ns,
            load_tokens=bid.load_tokens,
            blocks_idle=bid.blocks_idle,
            rest_ns=bid.rest_ns,
            preemptions=bid.preemptions,
        )

    # awards

    def _award(self, own: OwnInstance, ask: OutgoingAsk, now_ns: int) -> list[Effect]:
        ask.started_ns, ask.gone_ns = now_ns, 0
        body = MoveSequence(
            sequence=ask.sequence,
            target=ask.target,
            reason=ask.reason,
            award=ask.ask,
            mode=ask.mode,
            note=self._note(ask),
        )
        own.load.why = f"{ask.reason}: {ask.sequence} moves to {ask.target}"
        return [
            Request(
                subject=self._ctx.subjects.migrate(own.instance, "move"),
                body=body,
                correlation=f"{MOVE}/{ask.ask}/{ask.target}",
                timeout_ns=TRANSFER_NS,
                request=request_id_of(ask.sequence),
            )
        ]

    def _note(self, ask: OutgoingAsk) -> str:
        """Human-readable reason of the move and of the choice of target; it is recorded in the migration's span."""
        body = ask.body
        expected = "its rest is unknown" if body.rest_p50 is None else f"{body.rest_p50} tokens expected to come"
        expected += "" if body.rest_p90 is None else f" (90 %: {body.rest_p90} at most)"
        expected += f", others end {ask.gain_ns / 1e9:.3g} s sooner without it" if ask.gain_ns > 0 else ""
        bids = [f"{bid.bidder} {bid.burden_ns / 1e9:.3g} s, {bid.load_tokens} tokens" for bid, _ in ask.bids.values()]
        bids += [f"{name} {why}" for name, why in ask.declined.items() if name not in ask.bids]
        silent = len(ask.asked) - len(bids)
        heard = "; ".join([*bids, *([f"{silent} silent"] if silent > 0 else [])])
        return f"{ask.reason}: {body.why}; {expected}; asked {len(ask.asked)}: {heard}; {ask.why}"

    # ends

    def on_move_answer(
        self, own: OwnInstance, ask: OutgoingAsk, body: Body | RequestFailure, now_ns: int
    ) -> list[Effect]:
        """The migration is over. Without an answer it is taken as lost: the next snapshot shows who has it."""
        if not ask.moving:
            return []
        if not isinstance(body, MigrationFinished):
            return self._fire(own, ask, AskEvent.GONE, "lost", now_ns)
        ask.finished = body
        if ask.reason is MoveReason.BALANCE:
            own.balance.ended_ns = now_ns
        if body.outcome is MigrationOutcome.MOVED:
            own.costs.observe(body.cost)
            return self._fire(own, ask, AskEvent.MOVED, str(body.outcome), now_ns)
        if body.outcome is MigrationOutcome.LOST:
            return self._fire(own, ask, AskEvent.GONE, str(body.outcome), now_ns)
        return self._on_refused(own, ask, body, now_ns)

    def _on_refused(self, own: OwnInstance, ask: OutgoingAsk, body: MigrationFinished, now_ns: int) -> list[Effect]:
        how = str(body.refusal or body.outcome)
        ask.declined[ask.target] = how
        evacuation = own.evacuation
        if evacuation is not None:
            evacuation.failed += 1
            evacuation.refusals[ask.sequence] = how
            of_target = body.refusal in ELSEWHERE or body.refusal is KvRefusal.NOT_RUNNING
            if not of_target:
                evacuation.failures[ask.sequence] = evacuation.failures.get(ask.sequence, 0) + 1
        if body.refusal in ELSEWHERE and self._choose(own, ask, now_ns):
            return self._fire(own, ask, AskEvent.REFUSED, how, now_ns, again=True)
        return self._fire(own, ask, AskEvent.REFUSED, how, now_ns)

    def expire(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Ends what is over by time, and what concerns sequences that are not there any more."""
        effects: list[Effect] = []
        fresh = self._ctx.fresh(own, now_ns)
        for ask in list(own.asks.values()):
            gone = fresh and own.status(ask.sequence) is None
            if not ask.moving:
                if gone:
                    effects += self._fire(own, ask, AskEvent.GONE, "ended", now_ns)
                elif now_ns >= ask.deadline_ns:
                    effects += self.decide(own, ask, now_ns)
                continue
            ask.gone_ns = (ask.gone_ns or now_ns) if gone else 0
            if gone and now_ns - ask.gone_ns >= GONE_NS:
                effects += self._fire(own, ask, AskEvent.GONE, "gone", now_ns)
        notes = own.sequences
        notes.rests = {name: rest for name, rest in notes.rests.items() if now_ns < rest.until_ns or own.holds(name)}
        return effects

    def void(self, own: OwnInstance, why: str, now_ns: int) -> list[Effect]:
        """A new plan, or the bus was away: what was not awarded is given up; moves go on."""
        waiting = [ask for ask in own.asks.values() if not ask.moving]
        return [effect for ask in waiting for effect in self._fire(own, ask, AskEvent.VOID, why, now_ns)]

    def _fire(
        self, own: OwnInstance, ask: OutgoingAsk, event: AskEvent, how: str, now_ns: int, *, again: bool = False
    ) -> list[Effect]:
        """Goes where the table says; nothing where it says nothing. ``again``: another bid may be awarded."""
        if not ASKS.rows(ask.state, event):
            return []
        row = ASKS.take(ask.state, event, lambda _: again, who=ask.ask)
        ask.state = row.target
        if row.reaction is AskReaction.AWARD:
            return self._award(own, ask, now_ns)
        del own.asks[ask.ask]
        self.ended.append((own, ask))
        self._ctx.metrics.ended.add(str(ask.reason), how)
        notes = own.sequences
        if row.reaction is AskReaction.LEAVE:
            notes.rests.pop(ask.sequence, None)
            notes.left.add(ask.sequence)
            own.balance.rest = None
            if own.evacuation is not None:
                own.evacuation.moved += 1
        elif row.reaction is AskReaction.REST:
            self._rest(own, ask, how, now_ns)
        fields = {"ask": ask.ask, "sequence": ask.sequence, "source": own.instance, "target": ask.target}
        why = ask.why or ", ".join(f"{name} {refusal}" for name, refusal in ask.declined.items())
        fields |= {"reason": str(ask.reason), "result": how, "why": why}
        line = Log(level="debug", event="ask_ended", fields=fields, request=request_id_of(ask.sequence))
        return [CancelTimer(name=f"{ASK}/{ask.ask}"), line]

    def _rest(self, own: OwnInstance, ask: OutgoingAsk, how: str, now_ns: int) -> None:
        """It is left alone for a while, twice as long each time; but a drain has a limit and does not wait longer."""
        reasons = [str(each) for each in ask.declined.values()]
        if ask.reason is MoveReason.BALANCE:
            self._rest_balance(own, f"{ask.sequence}: {ask.why or ', '.join(reasons) or how}", now_ns)
            return
        if own.evacuation is not None and not ask.bids:
            own.evacuation.refusals[ask.sequence] = ", ".join(sorted(set(reasons))) or "no instance answered"
        if ask.reason is MoveReason.ORDER:
            return
        rests = own.sequences.rests
        before = rests.get(ask.sequence)
        refusals = before.refusals + 1 if before is not None else 1
        if how in (KvRefusal.TOO_MANY, KvRefusal.NO_BID) or BidRefusal.FULL in ask.declined.values():
            span_ms, refusals = SLOT_REST_MS, refusals - 1
        else:
            doublings = 0 if ask.reason is MoveReason.DRAIN else min(refusals - 1, 20)
            span_ms = min(REST_MS_MAX, REST_MS << doublings)
        rests[ask.sequence] = AskPause(self._later(now_ns, span_ms), refusals)

    def _rest_balance(self, own: OwnInstance, why: str, now_ns: int) -> None:
        before = own.balance.rest
        refusals = before.refusals + 1 if before is not None else 1
        span_ms = min(BALANCE_REST_MS_MAX, BALANCE_REST_MS << min(refusals - 1, 20))
        own.balance.rest = AskPause(self._later(now_ns, span_ms), refusals)
        own.load.why = f"balance: no gain ({why}), looks again in {span_ms / 1e3:g} s"

    def _later(self, now_ns: int, span_ms: int) -> int:
        """So much later, less up to a quarter: instances that were refused together do not return together."""
        return now_ns + int(span_ms * MS * (1 - 0.25 * self._ctx.rng.random()))


#: Failures of one sequence within one evacuation before it is left alone.
FAILURES_MAX = 5
