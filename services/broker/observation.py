"""Inputs of a broker: states of its instances, loads and boundaries of others, registrations and plans."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.actor.effects import Effect, Log, Subscribe, Unsubscribe
from millrace.contracts.broker import BoundaryMoved, LoadReported
from millrace.contracts.local import KeyChanged
from millrace.contracts.status import InstanceSummary, StatusSnapshot
from millrace.contracts.subjects import subject_token
from millrace.enginemodel.step_time_models import StepTimeModel

from services.broker.asks import Asks
from services.broker.bids import Bids
from services.broker.boundaries import Boundaries
from services.broker.forecasts import InstanceForecasts
from services.broker.loads import observe_summary
from services.broker.state import BrokerContext, OwnInstance


class Observation:
    """Applies snapshots, loads, plans and boundaries, and voids asks and bids of older plans."""

    def __init__(
        self,
        ctx: BrokerContext,
        owns: Mapping[str, OwnInstance],
        step_times: Mapping[str, StepTimeModel],
        *,
        asks: Asks,
        bids: Bids,
        boundaries: Boundaries,
    ) -> None:
        self._ctx = ctx
        self._owns = owns
        self._step_times = step_times
        self._asks = asks
        self._bids = bids
        self._boundaries = boundaries
        self._listening: set[str] = set()

    def on_snapshot(self, body: StatusSnapshot, now_ns: int) -> None:
        """The sequences of an instance of ours; those of another incarnation or model do not count."""
        own = self._own(body.instance)
        record = self._ctx.view.record(body.instance) if own is not None else None
        if own is None or record is None or record.incarnation != body.incarnation or record.model != body.model:
            return
        known = own.snapshot
        if known is not None and known.incarnation == body.incarnation and body.at_ns < known.at_ns:
            return
        own.snapshot, own.heard_ns = body, now_ns
        own.sequences.left.intersection_update(status.sequence for status in body.running)
        if own.forecasts is not None and (known is None or body.step != known.step):
            own.forecasts.observe(body)
        self._ctx.view.members.observe(body.instance, body.incarnation, now_ns)

    def _own(self, instance: str) -> OwnInstance | None:
        return self._owns.get(subject_token(instance)) if instance else None

    def on_summary(self, body: InstanceSummary, now_ns: int) -> None:
        """A heartbeat of an instance of ours."""
        own = self._own(body.instance)
        if own is not None and self._ctx.view.members.on_summary(body, now_ns).accepted:
            observe_summary(own, body)

    def on_load(self, body: LoadReported, now_ns: int) -> None:
        """The load of an instance."""
        if not self._ctx.view.on_load(body, now_ns):
            self._ctx.metrics.refused.add("load")

    def on_boundary(self, body: BoundaryMoved) -> None:
        """Take the current boundary of a stage."""
        if not self._ctx.view.on_boundary(body):
            self._ctx.metrics.refused.add("boundary")

    def on_key(self, body: KeyChanged, now_ns: int) -> list[Effect]:
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

    def on_bus(self, now_ns: int, *, connected: bool) -> None:
        """The bus went away or came back: what has not started is void, and only a fresh snapshot counts."""
        self._ctx.connected = connected
        if connected:
            self._ctx.back_ns = now_ns
            self._ctx.view.members.restart_timers(now_ns)
            return
        for own in self._owns.values():
            self._asks.void(own, "bus_away", now_ns)
            self._bids.void(own)
