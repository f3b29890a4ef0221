"""Asks for the sequences of our instances: which one shall leave, for which reason, and who is asked."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.actor.effects import Effect, Publish, StartTimer
from millrace.contracts.broker import AskForMove, MoveReason
from millrace.contracts.sequences import request_id_of
from millrace.contracts.status import InstanceRecord, SequenceStatus
from millrace.enginemodel.forecast import LeaveForecast
from millrace.policies.trading import LoadView, MovableSequence, TriggerView

from services.broker.deals import DealState, OutgoingDeal
from services.broker.fences import NEVER_MOVED, longest_rest_of, rest_of
from services.broker.intents import Intent, IntentView, SequencesOnDemand, movable, past_boundary, standing_intents
from services.broker.loads import present_load
from services.broker.shortage import shortage_risk
from services.broker.state import MS, BrokerContext, OwnInstance

#: Intents that are looked at in one tick: most of the rest would meet the same full targets.
LOOKED_AT_MAX = 16

#: Sequences whose leaving is simulated when memory runs short.
MEMORY_OFFERS_MAX = 8

#: Timers of asks: ``ask/<deal>``.
ASK = "ask"


class DealOpener:
    """Opens deals for the intents of our instances."""

    def __init__(self, ctx: BrokerContext) -> None:
        self._ctx = ctx

    def look(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Asks for what should leave now, within the bounds."""
        record = self._ctx.view.record(own.instance)
        if record is None or not self._ctx.fresh(own, now_ns):
            return []
        view, own.memory_risk = self._view(own, now_ns), self._risk(own, record)
        standing = standing_intents(view, self._ctx.fences)
        effects = self._ask_standing(own, record, standing, now_ns)
        if standing or now_ns - self._ctx.plan_ns.get(record.model, 0) < self._ctx.fences.plan_pause_ms * MS:
            return effects
        memory = self._memory(own, record, view, now_ns) if MoveReason.MEMORY in view.reasons else []
        return effects + (memory or self._balance(own, record, view, now_ns))

    def _risk(self, own: OwnInstance, record: InstanceRecord) -> float:
        assert own.snapshot is not None
        memory = self._ctx.config.memory
        return shortage_risk(
            own.snapshot,
            block_size=record.block_size,
            horizon_ns=max(memory.moves * round(own.costs.duration_ns), memory.horizon_ms * MS),
            promised_blocks=own.promised_blocks,
        )

    def _view(self, own: OwnInstance, now_ns: int) -> IntentView:
        assert own.snapshot is not None
        boundary = self._ctx.view.boundary(own.instance)
        own.past_ns = past_boundary(own.sequences(), boundary, own.past_ns, now_ns)
        return IntentView(
            sequences=own.sequences(),
            role=self._ctx.view.role(own.instance),
            draining=own.draining,
            boundary=boundary,
            reasons=self._ctx.config.trading.reasons,
            histories=own.histories,
            past_ns=own.past_ns,
            arriving=own.arriving,
            step_ns=own.snapshot.step_duration_ns,
            move_ns=round(own.costs.duration_ns),
            now_ns=now_ns,
        )

    # what has to leave

    def _ask_standing(
        self, own: OwnInstance, record: InstanceRecord, intents: Iterable[Intent], now_ns: int
    ) -> list[Effect]:
        effects: list[Effect] = []
        looked_at = 0
        for intent in intents:
            if looked_at >= LOOKED_AT_MAX or self._room(own) <= 0:
                break
            sequence = intent.status.sequence
            if self._is_open(own, sequence) or sequence in own.left or self._rests(own, sequence, now_ns):
                continue
            looked_at += 1
            effects += self._ask(own, record, intent, now_ns, leave=None)
        return effects

    def _room(self, own: OwnInstance) -> int:
        """Number of further sequences that may be asked for."""
        asking = sum(deal.state in (DealState.ASKING, DealState.OFFERING) for deal in own.outgoing.values())
        limits = self._ctx.limits
        return min(limits.asks_max - asking, limits.out_max + limits.out_queue_max - len(own.outgoing))

    def _is_open(self, own: OwnInstance, sequence: str) -> bool:
        return any(deal.sequence == sequence for deal in own.outgoing.values())

    def _rests(self, own: OwnInstance, sequence: str, now_ns: int) -> bool:
        rest = own.rests.get(sequence)
        return rest is not None and now_ns < rest.until_ns

    # memory and balance

    def _memory(self, own: OwnInstance, record: InstanceRecord, view: IntentView, now_ns: int) -> list[Effect]:
        """Memory may run short before a move could help, or is forecast to, twice in a row: asks for the sequence that
        holds most for longest, in the second case for one whose leaving avoids a preemption.
        """
        since_ns, at_risk = own.short_since_ns, own.memory_risk > self._ctx.config.memory.risk_max
        lasting = since_ns is not None and now_ns - since_ns >= self._ctx.limits.load_ms * MS
        if not (at_risk or lasting) or any(deal.reason is MoveReason.MEMORY for deal in own.outgoing.values()):
            return []
        able = self._able(own, view, MoveReason.MEMORY, now_ns)
        able.sort(key=lambda each: (-each.blocks * (each.rest_p50 or 1), each.sequence))
        if able and at_risk:
            status = own.status(able[0].sequence)
            return self._ask(own, record, Intent(status, MoveReason.MEMORY), now_ns, leave=None) if status else []
        for leave, sequence in self._by_gain(own, [each.sequence for each in able[:MEMORY_OFFERS_MAX]], now_ns):
            status = own.status(sequence)
            if status is not None and leave.preemptions_avoided > 0:
                return self._ask(own, record, Intent(status, MoveReason.MEMORY), now_ns, leave=leave)
        return []

    def _balance(self, own: OwnInstance, record: InstanceRecord, view: IntentView, now_ns: int) -> list[Effect]:
        """Ask for a move that the policy offers; one at a time, and not before loads show the last one."""
        if MoveReason.BALANCE not in view.reasons:
            return []
        able = SequencesOnDemand(lambda: self._able(own, view, MoveReason.BALANCE, now_ns))
        peers = self._ctx.view.peers(own.instance, now_ns)
        question = TriggerView(own=present_load(own), peers=peers, sequences=able)
        policy = self._ctx.policy
        answer, own.trading = policy.trigger(question, self._ctx.parameters, own.trading, now_ns)
        paused = now_ns - own.balanced_ns < self._ctx.limits.balance_pause_ms * MS
        if paused or any(deal.reason is MoveReason.BALANCE for deal in own.outgoing.values()):
            return []
        offers = [(None, sequence) for sequence in answer.offers]
        ordered = self._by_gain(own, list(answer.offers), now_ns) if policy.needs_forecast else offers
        for leave, sequence in ordered:
            status = own.status(sequence)
            if status is not None and (leave is None or leave.relieved_ns > 0):
                return self._ask(own, record, Intent(status, MoveReason.BALANCE), now_ns, leave=leave)
        return []

    def _able(self, own: OwnInstance, view: IntentView, reason: MoveReason, now_ns: int) -> list[MovableSequence]:
        taken = own.taken | own.left | {sequence for sequence in own.rests if self._rests(own, sequence, now_ns)}
        return movable(view, reason, taken, self._ctx.fences)

    def _by_gain(self, own: OwnInstance, sequences: list[str], now_ns: int) -> list[tuple[LeaveForecast, str]]:
        """Sequences by what the others gain if each leaves, most first; those without a forecast are left out."""
        forecast = [(leave, name) for name in sequences if (leave := self._leave(own, name, now_ns)) is not None]
        return sorted(forecast, key=lambda pair: (-pair[0].relieved_ns, pair[1]))

    def _leave(self, own: OwnInstance, sequence: str, now_ns: int) -> LeaveForecast | None:
        if own.forecasts is None or own.snapshot is None:
            return None
        return own.forecasts.leave(own.snapshot, self._ctx.view.boundary(own.instance), now_ns, sequence)

    # the ask

    def _ask(
        self, own: OwnInstance, record: InstanceRecord, intent: Intent, now_ns: int, *, leave: LeaveForecast | None
    ) -> list[Effect]:
        """Asks a few candidates; nothing where there is none."""
        status = intent.status
        length = status.prompt_tokens + status.output_tokens
        blocks = status.blocks + self._ctx.limits.growth_blocks
        targets = self._ctx.view.targets(own.instance, intent.reason, length, now_ns, blocks=blocks)
        if not targets or self._room(own) <= 0:
            return []
        if leave is None and self._ctx.policy.needs_forecast:
            leave = self._leave(own, status.sequence, now_ns)
        ask = self._worded(own, record, intent, leave)
        names = self._draw(targets)
        deadline_ns = now_ns + self._ctx.limits.ask_ms * MS
        own.outgoing[ask.deal] = OutgoingDeal(ask=ask, asked=names, deadline_ns=deadline_ns)
        self._ctx.metrics.asks[str(intent.reason)] += 1
        subjects, request = self._ctx.subjects, request_id_of(ask.sequence)
        asks = [Publish(subject=subjects.ask(record.model, name), body=ask, request=request) for name in names]
        return [*asks, StartTimer(name=f"{ASK}/{ask.deal}", at_ns=deadline_ns)]

    def _draw(self, targets: tuple[LoadView, ...]) -> tuple[str, ...]:
        """Of twice as many drawn at random those that carry least: not everybody asks the same ones."""
        most = self._ctx.limits.candidates_max
        drawn = list(targets)
        if len(drawn) > most:
            drawn = self._ctx.rng.sample(drawn, min(len(drawn), 2 * most))
        drawn.sort(key=lambda load: (load.demand / max(1, load.blocks_total), load.name))
        return tuple(load.name for load in drawn[:most])

    def _worded(
        self, own: OwnInstance, record: InstanceRecord, intent: Intent, leave: LeaveForecast | None
    ) -> AskForMove:
        status: SequenceStatus = intent.status
        history = own.histories.get(status.sequence, NEVER_MOVED)
        return AskForMove(
            deal=f"{self._ctx.rng.getrandbits(64):016x}",
            sequence=status.sequence,
            epoch=-1,
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
            gain_ns=leave.relieved_ns if leave is not None else 0,
            stay_ns=leave.rest_ns if leave is not None else 0,
            load_tokens=present_load(own).demand,
            queued_tokens=own.queued_out_tokens,
            moves=history.balance_moves,
            within_ms=self._ctx.limits.ask_ms,
        )
