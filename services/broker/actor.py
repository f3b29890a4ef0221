"""The broker: decides which of its instances' sequences leave, and where to.

Owns, for each of its instances: the load that is published, one intent per sequence, its asks and bids, what was
ordered; and the boundaries that its instances keep. It moves nothing itself: the source's migrator executes.

| message in | change | messages out |
|---|---|---|
| StatusSnapshot, InstanceSummary | the instance's state | |
| LoadsReported | loads of the own and the next stage | |
| AskForMove | a bid holds for a while | MoveBid |
| MoveBid | the ask has an answer; with the last one: | MoveSequence |
| TimerFired(ask/...) | the bids that came are compared | MoveSequence |
| Replied, RequestFailed(move/...) | the move is over, or the next bid is awarded | MoveSequence; MigrationFinished |
| MigrationFinished | what came to an instance of ours is remembered | |
| MigrateSequence | an intent, by order | AskForMove; in the end MigrationFinished |
| EvacuateInstance | everything shall leave the instance | AskForMove; in the end InstanceEvacuated |
| BoundaryMoved | the cut's boundary | |
| KeyChanged(plan) | what was not awarded is void | Subscribe |
| BusDisconnected, BusReconnected | nothing is asked for until a fresh snapshot came | |
| TimerFired(tick) | intents, deadlines | LoadsReported, AskForMove, ReturnSequences, BoundaryMoved,
ServicePresence |
| StopRequested | what was not awarded is given up; whoever waits hears so | ServicePresence, Stop |

Invariants: one ask per sequence of an instance; no more asks than ``out_max`` allows; at most ``BIDS_MAX`` bids hold;
every order is answered once; a refused message changes nothing.

Overload: what is not asked for now is looked at again with the next tick; further asks get no bid (FULL), further
orders are refused TOO_MANY.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from millrace.actor.effects import Effect, Log, Publish, StartTimer, Stop, Subscribe, Unsubscribe, WatchKeys, unexpected
from millrace.contracts.broker import AskForMove, BoundaryMoved, LoadReported, LoadsReported, MoveBid
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
from millrace.contracts.migration import EvacuateInstance, MigrateSequence, MigrationFinished
from millrace.contracts.status import InstanceSummary, ServicePresence, StatusSnapshot
from millrace.contracts.subjects import Subjects, subject_token
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.membership.heartbeat import Heartbeat

from services.broker.asks import ASK, MOVE, Asks
from services.broker.bids import BIDS_MAX, Bids
from services.broker.boundaries import UNPLANNED, Boundaries
from services.broker.cluster_view import BrokerView
from services.broker.config import BrokerConfig, trading_policy
from services.broker.forecasts import InstanceForecasts
from services.broker.loads import observe_summary, renew_load
from services.broker.metrics import BrokerMetrics
from services.broker.orders import ORDERS_MAX, Orders
from services.broker.returning import return_queued
from services.broker.state import ALL_OUT_MAX, MS, BalanceNotes, BrokerContext, OwnInstance

#: Heartbeat.
PRESENCE_NS = 1_000 * MS

#: Wire types that a broker takes.
ACCEPTS: tuple[type[Body], ...] = (
    AskForMove,
    BoundaryMoved,
    EvacuateInstance,
    InstanceSummary,
    LoadsReported,
    MigrateSequence,
    MigrationFinished,
    MoveBid,
    ServicePresence,
    StatusSnapshot,
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
            rng: Gives names of asks, draws of candidates, jitter.
            step_times: Parameter sets by the name that instances give.
        """
        self.name = config.name
        self.metrics = metrics
        policy, parameters = trading_policy(config.trading)
        subjects = Subjects(config.bus.cluster)
        view = BrokerView(load_age_ns=config.limits.load_age_ms * MS)
        self._ctx = BrokerContext(config, subjects, rng, view, metrics, policy, parameters)
        self._owns = {
            subject_token(name): OwnInstance(instance=name, balance=BalanceNotes(policy.initial_state))
            for name in config.instances
        }
        self._asks = Asks(self._ctx)
        self._orders = Orders(self._ctx, self._asks)
        self._bids = Bids(self._ctx)
        self._boundaries = Boundaries(self._ctx)
        self._step_times = step_times
        self._listening: set[str] = set()
        self._heartbeat = Heartbeat(
            subjects=subjects, role=Role.BROKER, name=self.name, incarnation=incarnation, instances=config.instances
        )
        self._shown_ns = 0
        metrics.instances = self._gauges

    def start(self, now_ns: int) -> list[Effect]:
        prefix, named = self._ctx.subjects.prefix, self._ctx.subjects
        subjects = [f"{prefix}.boundary.*.*"]
        for token, own in self._owns.items():
            subjects.append(named.presence(Role.WORKER, own.instance))
            subjects += [f"{prefix}.{kind}.*.{token}" for kind in ("status", "summary", "ask")]
            subjects += [named.bid(own.instance, "*"), named.migration("*", "*", own.instance)]
            subjects += [named.migrate(own.instance, verb) for verb in ("start", "evacuate")]
        return [
            WatchKeys(bucket="instance"),
            WatchKeys(bucket="plan"),
            *(Subscribe(subject=subject) for subject in subjects),
            *self._on_tick(TimerFired(name="tick"), now_ns),
        ]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        effects = self._dispatch(message, now_ns)
        while self._asks.ended:
            ended, self._asks.ended = self._asks.ended, []
            for own, ask in ended:
                effects += self._orders.on_ended(own, ask, now_ns)
                effects += self._go_on(own, now_ns)
        return effects

    def _go_on(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """Ask for what is ordered or has to leave at once, not with the next tick."""
        if not self._ctx.connected:
            return []
        leaving = self._asks.look_leaving(own, now_ns) if self._ctx.all_leave(own) else []
        return [*self._orders.look(own, now_ns), *leaving]

    def _dispatch(self, message: Message, now_ns: int) -> list[Effect]:
        match message.body:
            case StatusSnapshot() as body:
                return self._on_snapshot(body, now_ns)
            case InstanceSummary() as body:
                own = self._own(body.instance)
                if own is not None and self._ctx.view.members.on_summary(body, now_ns).accepted:
                    observe_summary(own, body)
                return []
            case ServicePresence() as body:
                self._ctx.view.on_presence(body)
                return []
            case BoundaryMoved() as body:
                return self._believed("boundary", self._ctx.view.on_boundary(body))
            case LoadsReported(loads=loads):
                return [none for load in loads for none in self._believed("load", self._ctx.view.on_load(load, now_ns))]
            case KeyChanged() as body:
                return self._on_key(body, now_ns)
            case Replied(correlation=correlation, body=body):
                return self._on_answer(correlation, body, now_ns)
            case RequestFailed(correlation=correlation, reason=reason):
                return self._on_answer(correlation, reason, now_ns)
            case TimerFired() as body:
                return self._on_timer(body, now_ns)
            case BusDisconnected() | BusReconnected() as body:
                return self._on_bus(now_ns, connected=isinstance(body, BusReconnected))
            case StopRequested():
                return self._on_stop(now_ns)
            case _:
                return self._on_addressed(message, now_ns)

    def _believed(self, what: str, believed: bool) -> list[Effect]:
        """Counts what changes nothing."""
        if not believed:
            self._ctx.metrics.refused.add(what)
        return []

    def _own(self, instance: str) -> OwnInstance | None:
        return self._owns.get(subject_token(instance)) if instance else None

    def _on_addressed(self, message: Message, now_ns: int) -> list[Effect]:
        tokens, body, ours = message.subject.split("."), message.body, self._owns
        match body:
            case AskForMove() if (own := ours.get(tokens[-1])) is not None:
                return self._bids.on_ask(own, body, now_ns)
            case MoveBid() if len(tokens) > 1 and (own := ours.get(tokens[-2])) is not None:
                return self._asks.on_bid(own, body, now_ns)
            case MigrationFinished() if (own := ours.get(tokens[-1])) is not None:
                self._bids.on_finished(own, body, now_ns)
                return []
            case MigrateSequence() if len(tokens) > 1 and (own := ours.get(tokens[-2])) is not None:
                return self._orders.on_move(own, body, message.reply_to, now_ns)
            case EvacuateInstance() if len(tokens) > 1 and (own := ours.get(tokens[-2])) is not None:
                begun = self._orders.on_evacuate(own, body, message.reply_to, now_ns)
                return [*begun, *self._look([own], now_ns)] if self._ctx.connected else begun
            case _:
                self._ctx.metrics.refused.add("misdirected")
                return unexpected(message, f"a broker does not take {type(body).__name__} here")

    def _on_answer(self, correlation: str, body: Body | RequestFailure, now_ns: int) -> list[Effect]:
        """A move's end: ``move/<ask>/<target>``."""
        kind, _, rest = correlation.partition("/")
        name, _, target = rest.partition("/")
        for own in self._owns.values():
            ask = own.asks.get(name)
            if kind == MOVE and ask is not None and ask.target == target:
                return self._asks.on_move_answer(own, ask, body, now_ns)
        return []

    # what is heard

    def _on_snapshot(self, body: StatusSnapshot, now_ns: int) -> list[Effect]:
        """The sequences of an instance of ours; those of another incarnation or model do not count."""
        own = self._own(body.instance)
        record = self._ctx.view.record(body.instance) if own is not None else None
        if own is None or record is None or record.incarnation != body.incarnation or record.model != body.model:
            return []
        known = own.snapshot
        if known is not None and known.incarnation == body.incarnation and body.at_ns < known.at_ns:
            return []
        own.snapshot, own.heard_ns = body, now_ns
        own.sequences.left.intersection_update(status.sequence for status in body.running)
        if own.forecasts is not None and (known is None or body.step != known.step):
            own.forecasts.observe(body)
        self._ctx.view.members.observe(body.instance, body.incarnation, now_ns)
        return self._go_on(own, now_ns)

    def _on_key(self, body: KeyChanged, now_ns: int) -> list[Effect]:
        """A registration or a plan."""
        if body.bucket == "plan":
            model = self._ctx.view.on_plan(body)
            return [*(self._on_new_plan(model, now_ns) if model else []), *self._listen()]
        own, before = self._own(body.key), self._ctx.view.record(body.key)
        if own is None and before is not None and before == body.value:
            return []  # repeated every three seconds by each of a thousand instances
        self._ctx.view.on_record(body, now_ns)
        if own is None:
            return []
        effects, after = self._on_own_record(own, now_ns), self._ctx.view.record(body.key)
        same = before is not None and after is not None and before.model == after.model
        return effects if same else [*effects, *self._listen()]

    def _on_own_record(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """An instance of ours is registered, gone, or was started anew: then its sequences are lost."""
        record = self._ctx.view.record(own.instance)
        restarted = own.snapshot is not None and record is not None and own.snapshot.incarnation != record.incarnation
        effects: list[Effect] = []
        if record is None or restarted:
            effects = self._asks.void(own, "instance_lost", now_ns)
            self._bids.void(own)
            own.snapshot, own.summary, own.forecasts = None, None, None
            own.sequences.histories.clear()
            own.sequences.left.clear()
        if record is None or own.forecasts is not None:
            return effects
        try:
            own.forecasts = InstanceForecasts(record, self._step_times.get(record.step_time))
        except ValueError as error:
            fields = {"instance": own.instance, "error": str(error)}
            effects.append(Log(level="error", event="instance_unusable", fields=fields))
        return effects

    def _on_new_plan(self, model: str, now_ns: int) -> list[Effect]:
        """Void what was asked and bid under the old plan."""
        effects: list[Effect] = []
        for own in self._owns.values():
            record = self._ctx.view.record(own.instance)
            if record is not None and subject_token(record.model) == subject_token(model):
                self._ctx.plan_ns[record.model] = now_ns
                effects += self._asks.void(own, "new_plan", now_ns)
                self._bids.void(own)
        return effects

    def _listen(self) -> list[Effect]:
        """Loads of the stages that concern our instances."""
        wanted = {subject for own in self._owns.values() for subject in self._boundaries.load_subjects(own)}
        effects: list[Effect] = [Subscribe(subject=subject) for subject in sorted(wanted - self._listening)]
        effects += [Unsubscribe(subject=subject) for subject in sorted(self._listening - wanted)]
        self._listening = wanted
        return effects

    def _on_bus(self, now_ns: int, *, connected: bool) -> list[Effect]:
        """The bus went away or came back: what has not started is void, and only a fresh snapshot counts."""
        self._ctx.connected = connected
        if connected:
            self._ctx.back_ns = now_ns
            self._ctx.view.members.restart_timers(now_ns)
            return []
        for own in self._owns.values():
            self._asks.void(own, "bus_away", now_ns)
            self._bids.void(own)
        return []

    # time

    def _on_timer(self, fired: TimerFired, now_ns: int) -> list[Effect]:
        kind, _, about = fired.name.partition("/")
        if kind == "tick":
            return self._on_tick(fired, now_ns)
        for own in self._owns.values():
            if kind == ASK and about in own.asks:
                return self._asks.decide(own, own.asks[about], now_ns)
        return []

    def _on_tick(self, fired: TimerFired, now_ns: int) -> list[Effect]:
        period_ns = self._ctx.limits.tick_ms * MS
        effects: list[Effect] = [StartTimer.again(fired, now_ns, period_ns)]
        if now_ns - self._shown_ns >= PRESENCE_NS - period_ns // 2:
            self._shown_ns = now_ns
            effects.append(self._heartbeat.presence(now_ns))
        return effects + (self._look(list(self._owns.values()), now_ns) if self._ctx.connected else [])

    def _look(self, owns: Sequence[OwnInstance], now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for own in owns:
            self._bids.expire(own, now_ns)
            effects += [*self._asks.expire(own, now_ns), *self._orders.look(own, now_ns)]
        effects += self._publish_loads(owns, now_ns)
        for own in owns:
            effects += self._asks.look(own, now_ns)
            effects += return_queued(self._ctx, own, now_ns)
            effects += self._boundaries.look(own, now_ns)
        return effects

    def _publish_loads(self, owns: Sequence[OwnInstance], now_ns: int) -> list[Effect]:
        """One message for all instances of a stage whose loads are due."""
        due: dict[str, list[LoadReported]] = {}
        for own in owns:
            record = self._ctx.view.record(own.instance)
            if record is None or not self._ctx.fresh(own, now_ns):
                continue
            if now_ns - own.load.at_ns < self._ctx.limits.load_ms * MS:
                continue
            load = renew_load(self._ctx, own, record, now_ns)
            self._ctx.view.on_load(load, now_ns)
            due.setdefault(self._ctx.subjects.load(record.model, load.stage or UNPLANNED), []).append(load)
        return [Publish(subject=subject, body=LoadsReported(loads=loads)) for subject, loads in due.items()]

    def _on_stop(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for own in self._owns.values():
            effects += [*self._asks.void(own, "broker_stops", now_ns), *self._orders.abandon(own, now_ns)]
        self._asks.ended.clear()
        return [*effects, self._heartbeat.leaving(now_ns), Stop(reason="asked to stop")]

    # for people and checkers

    def _gauges(self) -> list[tuple[str, int, int, float]]:
        return [(own.instance, len(own.asks), len(own.bids), own.load.memory_risk) for own in self._owns.values()]

    def snapshot(self) -> dict[str, Any]:
        instances = {own.instance: self._plain(own) for own in self._owns.values()}
        return {"name": self.name, "instances": instances, **self._ctx.view.plain(self._ctx.back_ns)}

    def _plain(self, own: OwnInstance) -> dict[str, Any]:
        stage, above = self._ctx.view.stage(own.instance), self._ctx.view.next_stage(own.instance)
        return {
            "stage": stage.name if stage is not None else "",
            "boundary": self._ctx.view.boundary(own.instance),
            "above": above.instances if above is not None else [],
            "out": {ask.ask: [ask.sequence, str(ask.reason), ask.target, str(ask.state)] for ask in own.asks.values()},
            "in": {name: [bid.ask.sequence, str(bid.ask.reason), bid.ask.source] for name, bid in own.bids.items()},
            "orders": sorted(own.orders),
            "evacuated": own.evacuation is not None,
            "resting": len(own.sequences.rests),
            "why": own.load.why,
        }

    def check_invariants(self) -> None:
        self._ctx.view.check_invariants()
        for own in self._owns.values():
            assert len(own.asks) <= max(self._ctx.limits.out_max, ALL_OUT_MAX), f"{own.instance}: too many asks"
            assert len(own.bids) <= BIDS_MAX
            assert len(own.orders) <= ORDERS_MAX
            assert len(own.taken) == len(own.asks), f"{own.instance}: two asks about one sequence"
