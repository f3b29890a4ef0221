"""The broker: trades running sequences for its instances.

Owns, for each of its instances: the load that others are told, one intent per sequence, its asks, bids and deals on
both sides; and the boundaries that its instances keep. It moves nothing itself: the source's migrator executes.

| message in | change | messages out |
|---|---|---|
| StatusSnapshot, InstanceSummary | the instance's state | |
| LoadReported, LoadsReported | loads of the own and the next stage | |
| AskForMove | a bid holds for a while | MoveBid, NoBid |
| MoveBid, NoBid | the ask has an answer; with the last one: | OfferDeal |
| TimerFired(ask/...) | the bids that came are compared | OfferDeal |
| OfferDeal | the sequence is queued, or has a slot | DealQueued, DealRefused |
| Replied(offer/...) | queued, or: | MigrateSequence, DealStarted |
| GrantDeal | started, where there is a slot | DealStarted, DealPostponed, DealRefused; MigrateSequence |
| Replied, RequestFailed(move/...) | the deal is over | DealEnded |
| DealStarted, WithdrawDeal, DealEnded | the target's slot is in use, or free | GrantDeal |
| BoundaryMoved | the cut's boundary | |
| EvacuationAnnounced | the instance drains, until its migrator says that this is over | AskForMove |
| KeyChanged(plan) | what has not started is void | WithdrawDeal, Subscribe |
| BusDisconnected, BusReconnected | nothing is traded until a fresh snapshot came | |
| TimerFired(tick) | intents, deadlines, slots | LoadReported, LoadsReported, AskForMove, ReturnSequences,
BoundaryMoved, ServicePresence |
| StopRequested | what has not started is withdrawn | WithdrawDeal, ServicePresence, Stop |

Invariants: one open deal per sequence of an instance; at most ``out_max`` transfers away and ``in_max`` slots given;
queues within their bounds; nothing is agreed without an open bid; a refused message changes nothing.

Overload: queues that are full answer FULL; what is not asked for now is looked at again with the next tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from millrace.actor.effects import Effect, Publish, StartTimer, Stop, Subscribe, WatchKeys
from millrace.contracts.broker import (
    AskForMove,
    BoundaryMoved,
    DealEnded,
    DealStarted,
    EvacuationAnnounced,
    GrantDeal,
    LoadReported,
    LoadsReported,
    MoveBid,
    NoBid,
    OfferDeal,
    WithdrawDeal,
)
from millrace.contracts.catalog import Role
from millrace.contracts.local import (
    BusDisconnected,
    BusReconnected,
    KeyChanged,
    Replied,
    RequestFailed,
    RequestFailure,
    StopRequested,
    TimerFired,
)
from millrace.contracts.message import Body, Message
from millrace.contracts.status import InstanceSummary, ServicePresence, StatusSnapshot
from millrace.contracts.subjects import Subjects, subject_token
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.membership import Heartbeat

from services.broker.addressing import forged, trade_peer, unexpected
from services.broker.asking import ASK, DealOpener
from services.broker.bidding import Bidding
from services.broker.boundaries import UNPLANNED, Boundaries
from services.broker.cluster_view import BrokerView
from services.broker.config import BrokerConfig, trading_policy
from services.broker.incoming import GRANT, IncomingDeals
from services.broker.loads import renew_load
from services.broker.metrics import BrokerMetrics
from services.broker.observation import Observation
from services.broker.outgoing import MOVE, OFFER, OutgoingDeals
from services.broker.returning import Returning
from services.broker.state import MS, BrokerContext, OwnInstance

#: Heartbeat: a migrator whose broker was not heard for 1.5 s acts by itself.
PRESENCE_NS = 500 * MS

#: Wire types that a broker takes.
ACCEPTS: tuple[type[Body], ...] = (
    AskForMove,
    BoundaryMoved,
    DealEnded,
    DealStarted,
    EvacuationAnnounced,
    GrantDeal,
    InstanceSummary,
    LoadReported,
    LoadsReported,
    MoveBid,
    NoBid,
    OfferDeal,
    ServicePresence,
    StatusSnapshot,
    WithdrawDeal,
)


class BrokerActor:
    """The broker of one instance, or of many that share a process."""

    def __init__(
        self,
        *,
        config: BrokerConfig,
        incarnation: int,
        rng: Random,
        step_times: Mapping[str, StepTimeModel],
        metrics: BrokerMetrics,
    ) -> None:
        """Raises ConfigError where the trading policy is none.

        Args:
            rng: Gives names of deals, draws of candidates, jitter.
            step_times: Parameter sets by the name that instances give.
        """
        self.name = config.name
        self.metrics = metrics
        policy, parameters = trading_policy(config.trading)
        subjects = Subjects(config.bus.cluster)
        view = BrokerView(load_age_ns=config.limits.load_age_ms * MS)
        self._ctx = BrokerContext(config, subjects, rng, view, metrics, policy, parameters)
        self._owns = {
            subject_token(name): OwnInstance(instance=name, trading=policy.initial_state) for name in config.instances
        }
        self._asking = DealOpener(self._ctx)
        self._outgoing = OutgoingDeals(self._ctx)
        self._returning = Returning(self._ctx)
        self._bidding = Bidding(self._ctx)
        self._incoming = IncomingDeals(self._ctx)
        self._boundaries = Boundaries(self._ctx)
        self._observation = Observation(
            self._ctx,
            self._owns,
            step_times,
            outgoing=self._outgoing,
            incoming=self._incoming,
            boundaries=self._boundaries,
        )
        self._heartbeat = Heartbeat(
            subjects=subjects, role=Role.BROKER, name=self.name, incarnation=incarnation, instances=config.instances
        )
        self._shown_ns = 0
        metrics.open_deals = self._gauges
        metrics.memory_risks = self._risks

    def start(self, now_ns: int) -> list[Effect]:
        """Watches instances and plans, listens to its instances' subjects, begins to tick."""
        prefix = self._ctx.subjects.prefix
        subjects = [self._ctx.subjects.presences(Role.BROKER), f"{prefix}.boundary.*.*"]
        for token in self._owns:
            subjects.append(self._ctx.subjects.presence(Role.WORKER, token))
            subjects += [f"{prefix}.{kind}.*.{token}" for kind in ("status", "summary", "ask")]
            subjects += [f"{prefix}.{kind}.{token}" for kind in ("bid", "deal", "evacuation")]
        return [
            WatchKeys(bucket="instance"),
            WatchKeys(bucket="plan"),
            *(Subscribe(subject=subject) for subject in subjects),
            *self._on_tick(now_ns),
        ]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        """See the table above."""
        match message.body:
            case StatusSnapshot() | InstanceSummary() | ServicePresence() | BoundaryMoved():
                self._observe(message, now_ns)
                return []
            case LoadReported() | LoadsReported() as body:
                self._on_loads(body.loads if isinstance(body, LoadsReported) else [body], message.sender, now_ns)
                return []
            case EvacuationAnnounced() as body:
                self._observe(message, now_ns)
                own = self._owns.get(body.instance)
                return self._look([own], now_ns) if own is not None and self._ctx.connected else []
            case KeyChanged() as body:
                return self._observation.on_key(body, now_ns)
            case Replied(correlation=correlation, body=body):
                return self._on_answer(correlation, body, now_ns)
            case RequestFailed(correlation=correlation, reason=reason):
                return self._on_answer(correlation, reason, now_ns)
            case TimerFired(name=name):
                return self._on_timer(name, now_ns)
            case BusDisconnected() | BusReconnected() as body:
                self._observation.on_bus(now_ns, connected=isinstance(body, BusReconnected))
                return []
            case StopRequested():
                return self._on_stop(now_ns)
            case _:
                return self._on_trade(message, now_ns)

    def _observe(self, message: Message, now_ns: int) -> None:
        match message.body:
            case StatusSnapshot() as body:
                self._observation.on_snapshot(body, now_ns)
            case InstanceSummary() as body:
                self._observation.on_summary(body, now_ns)
            case ServicePresence() as body:
                self._ctx.view.on_presence(body, now_ns)
            case EvacuationAnnounced() as body:
                self._observation.on_evacuation(body, now_ns)
            case BoundaryMoved() as body if self._is_broker(body.keeper, message.sender, now_ns):
                self._observation.on_boundary(body)

    def _on_loads(self, loads: Sequence[LoadReported], sender: str, now_ns: int) -> None:
        for load in loads:
            if self._is_broker(load.instance, sender, now_ns):
                self._observation.on_load(load, now_ns)

    def _is_broker(self, instance: str, sender: str, now_ns: int) -> bool:
        """Whether the sender acts for that instance; who does not is counted."""
        known = bool(sender) and sender == self._ctx.view.broker_of(instance, now_ns)
        if not known:
            self._ctx.metrics.refused["forged"] += 1
        return known

    # trades

    def _on_trade(self, message: Message, now_ns: int) -> list[Effect]:
        """Asks, bids and deals, by the instance that the subject names: ``<kind>...<instance>``."""
        own = self._owns.get(message.subject.rpartition(".")[2])
        body = message.body
        peer = trade_peer(body, to=own.instance) if own is not None else None
        if own is None or peer is None:
            self._ctx.metrics.refused["misdirected"] += 1
            return unexpected(message)
        if not self._is_broker(peer, message.sender, now_ns):
            return forged(message)
        match body:
            case AskForMove():
                return self._bidding.on_ask(own, body, now_ns)
            case MoveBid() | NoBid():
                return self._outgoing.on_bid(own, body, now_ns)
            case OfferDeal():
                return self._incoming.on_offer(own, body, message.reply_to, now_ns)
            case GrantDeal():
                return self._outgoing.on_grant(own, body, message.reply_to, now_ns)
            case WithdrawDeal():
                return self._incoming.on_withdrawn(own, body, now_ns)
            case DealStarted():
                return self._incoming.on_started(own, body, now_ns)
            case DealEnded():
                return self._incoming.on_ended(own, body, now_ns)
            case _:
                return unexpected(message)

    def _on_answer(self, correlation: str, body: Body | RequestFailure, now_ns: int) -> list[Effect]:
        kind, _, name = correlation.partition("/")
        for own in self._owns.values():
            incoming, outgoing = own.incoming.get(name), own.outgoing.get(name)
            if kind == GRANT and incoming is not None:
                return self._incoming.on_grant_answer(own, incoming, body, now_ns)
            if kind == OFFER and outgoing is not None:
                return [*self._outgoing.on_offer_answer(own, outgoing, body, now_ns), *self._drain_on(own, now_ns)]
            if kind == MOVE and outgoing is not None:
                return [*self._outgoing.on_move_answer(own, outgoing, body, now_ns), *self._drain_on(own, now_ns)]
        return []

    def _drain_on(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """A drain has a limit: what is next is asked for at once, not with the next tick."""
        return self._asking.look(own, now_ns) if own.draining else []

    # time

    def _on_timer(self, name: str, now_ns: int) -> list[Effect]:
        kind, _, about = name.partition("/")
        if kind == "tick":
            return self._on_tick(now_ns)
        for own in self._owns.values():
            if kind == ASK and about in own.outgoing:
                return self._outgoing.decide(own, own.outgoing[about], now_ns)
        return []

    def _on_tick(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = [StartTimer(name="tick", at_ns=now_ns + self._ctx.limits.tick_ms * MS)]
        if now_ns - self._shown_ns >= PRESENCE_NS:
            self._shown_ns = now_ns
            effects.append(self._heartbeat.presence(now_ns))
        return effects + (self._look(list(self._owns.values()), now_ns) if self._ctx.connected else [])

    def _look(self, owns: Sequence[OwnInstance], now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for own in owns:
            if now_ns >= own.evacuated_until_ns:
                own.evacuated_until_ns = 0
            effects += [*self._outgoing.expire(own, now_ns), *self._incoming.expire(own, now_ns)]
        effects += self._tell_loads(owns, now_ns)
        for own in owns:
            effects += self._asking.look(own, now_ns)
            effects += self._returning.look(own, now_ns)
            effects += self._boundaries.look(own, now_ns)
        return effects

    def _tell_loads(self, owns: Sequence[OwnInstance], now_ns: int) -> list[Effect]:
        """One message for all instances of a stage whose loads are due."""
        told: dict[str, list[LoadReported]] = {}
        for own in owns:
            record = self._ctx.view.record(own.instance)
            if record is None or not self._ctx.fresh(own, now_ns):
                continue
            if now_ns - own.told_ns < self._ctx.limits.load_ms * MS:
                continue
            load = renew_load(self._ctx, own, record, now_ns)
            self._ctx.view.on_load(load, now_ns)
            told.setdefault(self._ctx.subjects.load(record.model, load.stage or UNPLANNED), []).append(load)
        return [
            Publish(subject=subject, body=loads[0] if len(loads) == 1 else LoadsReported(loads=loads))
            for subject, loads in told.items()
        ]

    def _on_stop(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for own in self._owns.values():
            effects += self._outgoing.void(own, "broker_stops", now_ns)
        return [*effects, self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]

    # for people and checkers

    def _gauges(self) -> list[tuple[str, str, int]]:
        rows: list[tuple[str, str, int]] = []
        for own in self._owns.values():
            rows += [(own.instance, "out", len(own.outgoing)), (own.instance, "in", len(own.incoming))]
        return rows

    def _risks(self) -> list[tuple[str, float]]:
        return [(own.instance, own.memory_risk) for own in self._owns.values()]

    def snapshot(self) -> dict[str, Any]:
        """State for people and checkers."""
        instances = {own.instance: self._plain(own) for own in self._owns.values()}
        return {"name": self.name, "instances": instances, **self._ctx.view.plain(self._ctx.back_ns)}

    def _plain(self, own: OwnInstance) -> dict[str, Any]:
        stage, above = self._ctx.view.stage(own.instance), self._ctx.view.next_stage(own.instance)
        return {
            "stage": stage.name if stage is not None else "",
            "boundary": self._ctx.view.boundary(own.instance),
            "above": above.instances if above is not None else [],
            "out": {
                deal.deal: [deal.sequence, str(deal.reason), deal.target, str(deal.state)]
                for deal in own.outgoing.values()
            },
            "in": {
                deal.deal: [deal.offer.sequence, str(deal.offer.reason), deal.offer.source, str(deal.state)]
                for deal in own.incoming.values()
            },
            "bids": len(own.bids),
            "resting": len(own.rests),
        }

    def check_invariants(self) -> None:
        """Raises AssertionError where the state contradicts itself."""
        limits = self._ctx.limits
        self._ctx.view.check_invariants()
        for own in self._owns.values():
            assert own.moving_out <= limits.out_max, f"{own.instance}: {own.moving_out} transfers away"
            assert own.slots_taken <= limits.in_max, f"{own.instance}: {own.slots_taken} slots given"
            assert len(own.outgoing) <= limits.out_max + limits.out_queue_max
            assert len(own.incoming) <= limits.in_queue_max
            assert len(own.bids) <= limits.bids_max
            assert len(own.taken) == len(own.outgoing), f"{own.instance}: two deals about one sequence"
            arriving = {deal.offer.sequence for deal in own.incoming.values()}
            assert len(arriving) == len(own.incoming), f"{own.instance}: one sequence arrives twice"
