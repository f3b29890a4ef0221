"""Observer's view of a cluster: takes received messages, returns rows of a table. Pure; used by status and top."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.cli.cluster_rows import InstanceRow, LoadSums, MigrationRow, ServiceRow, StageRow, Totals
from millrace.contracts.broker import BoundaryMoved
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.message import Body
from millrace.contracts.plan import Advice, InstanceRole, Plan, Stage
from millrace.contracts.status import (
    InstanceMigrations,
    InstanceRecord,
    InstanceSummary,
    PresenceState,
    ServicePresence,
)
from millrace.membership.config import MembershipConfig
from millrace.membership.heartbeat import HEARTBEAT_NS

#: An instance without a summary for this long is suspect, as ingress sees it.
SUSPECT_NS = MembershipConfig().instance_silence_ns

#: A service without this many heartbeats, and half of another, is silent.
SILENT_NS = round(3.5 * HEARTBEAT_NS)

#: tok/s is taken over the last summaries within this span: long enough to be steady, short enough to be now.
RATE_NS = 2_000_000_000

#: What left is still shown for this long.
GONE_NS = 30_000_000_000


class ClusterView:
    """Keeps the last word of each instance and service.

    Attributes:
        connected: Whether the bus is there; set by whoever feeds the view.
    """

    def __init__(self) -> None:
        self.connected = True
        self._summaries: dict[str, list[tuple[int, InstanceSummary]]] = {}
        self._presences: dict[tuple[str, str], tuple[int, ServicePresence]] = {}
        self._records: dict[str, InstanceRecord] = {}
        self._plans: dict[str, Plan] = {}
        self._cascades: dict[str, CascadePlan] = {}
        self._boundaries: dict[tuple[str, str], BoundaryMoved] = {}

    def hear(self, body: Body, now_ns: int) -> None:
        """Takes a message; other types than those shown here are ignored."""
        match body:
            case InstanceSummary():
                self._hear_summary(body, now_ns)
            case ServicePresence():
                self._presences[(body.role, body.name)] = (now_ns, body)
            case InstanceRecord():
                self._records[body.instance] = body
            case Plan():
                self._plans[body.model] = body
            case CascadePlan():
                self._cascades[body.cascade] = body
            case BoundaryMoved():
                self._boundaries[(body.model, body.stage)] = body
            case _:
                pass

    def hear_stored(self, bucket: str, bodies: list[Body], now_ns: int) -> None:
        """Takes everything that stands in a bucket; registrations that are no longer there are forgotten."""
        if bucket == "instance":
            self._records.clear()
        if bucket == "cascade":
            self._cascades.clear()
        for body in bodies:
            self.hear(body, now_ns)

    def cascades(self) -> list[CascadePlan]:
        """Plans in force, by name."""
        return [self._cascades[name] for name in sorted(self._cascades)]

    def instances(self, now_ns: int) -> list[InstanceRow]:
        """One row per instance, those of a stage together in the plan's order, then by name with numbers in order;
        instances long gone are left out.
        """
        drained = self._drained(now_ns)
        order = self._stage_order()
        known = self._summaries.keys() | self._records.keys() | drained.keys()
        names = sorted(known, key=lambda name: (order.get(name, ("", -1)), _natural(name)))
        rows = [
            InstanceRow(instance=name, model=drained[name], stage="", state="drained")
            if name in drained
            else self._instance(name, now_ns)
            for name in names
        ]
        return [row for row in rows if row is not None]

    def instance(self, name: str, now_ns: int) -> InstanceRow | None:
        return next((row for row in self.instances(now_ns) if row.instance == name), None)

    def orders(self) -> list[tuple[str, str, InstanceRole]]:
        """(instance, role, ordered role) of instances that do not have yet what an operator ordered, by name."""
        found = []
        for plan in self._plans.values():
            roles = {n: stage.roles.get(n, InstanceRole.BOTH) for stage in plan.stages for n in stage.instances}
            found += [(n, roles[n], role) for n, role in plan.role_orders.items() if roles.get(n, role) is not role]
        return sorted(found)

    def plans(self) -> dict[str, Plan]:
        """The plan of each model."""
        return self._plans

    def advice(self) -> list[Advice]:
        """The autopilot's, of each plan that has one."""
        return [plan.advice for _, plan in sorted(self._plans.items()) if plan.advice is not None]

    def epoch(self, model: str) -> int:
        """Epoch of the model's plan; 0 where none was seen."""
        plan = self._plans.get(model)
        return plan.epoch if plan is not None else 0

    def _drained(self, now_ns: int) -> dict[str, str]:
        """Model of each instance that an operator has drained, as supervisors say."""
        return {
            each.instance: each.model
            for (role, _), (at_ns, body) in self._presences.items()
            if role == "supervisor" and body.state is PresenceState.ALIVE and now_ns - at_ns <= SILENT_NS
            for each in body.drained
        }

    def hosts(self, now_ns: int) -> list[str]:
        """Machines on which a supervisor takes orders, by name."""
        heard = [body for at_ns, body in self._presences.values() if now_ns - at_ns <= SILENT_NS]
        return sorted({body.host for body in heard if body.host and body.state is PresenceState.ALIVE})

    def _stage_order(self) -> dict[str, tuple[str, int]]:
        """Place of each instance by plans of several stages."""
        return {
            name: (model, index)
            for model, plan in self._plans.items()
            if len(plan.stages) > 1
            for index, stage in enumerate(plan.stages)
            for name in stage.instances
        }

    def stages(self, rows: list[InstanceRow]) -> list[StageRow]:
        """One row per stage of each plan that has several, in its order. ``rows``: of ``instances``."""
        found: list[StageRow] = []
        for model, plan in sorted(self._plans.items()):
            bounds: list[int | None] = [0, *self._cuts(plan), None]
            if len(plan.stages) > 1:
                found += [
                    _stage_row(model, stage, (low or 0, high), rows)
                    for stage, low, high in zip(plan.stages, bounds, bounds[1:], strict=False)
                ]
        return found

    def _cuts(self, plan: Plan) -> list[int]:
        """Present upper bounds of its stages but the last: as refined last within this plan, else as planned."""
        refined = {
            stage: body.length
            for (model, stage), body in self._boundaries.items()
            if model == plan.model and plan.boundary_epoch <= body.plan_epoch <= plan.epoch
        }
        return plan.present_cuts(refined)

    def services(self, now_ns: int) -> list[ServiceRow]:
        """One row per service other than workers, by role and name."""
        return [
            ServiceRow(
                role=body.role,
                name=body.name,
                state="silent"
                if body.state is PresenceState.ALIVE and now_ns - at_ns > SILENT_NS
                else body.state.value,
                url=body.url,
                uptime_s=max(0, now_ns - body.incarnation) / 1e9 if body.incarnation else 0.0,
                heard_s_ago=max(0, now_ns - at_ns) / 1e9,
                trouble=body.trouble,
            )
            for (role, _), (at_ns, body) in sorted(self._presences.items())
            if role != "worker" and now_ns - at_ns < GONE_NS
        ]

    def migrations(self, now_ns: int) -> list[MigrationRow]:
        """Those under way, oldest first; each migrator tells of so many (its ``TOLD_MAX``)."""
        rows = [
            MigrationRow(
                sequence=each.sequence,
                source=each.source,
                target=each.target,
                step=each.step,
                round=each.round,
                age_s=max(0, body.at_ns - each.began_ns + now_ns - at_ns) / 1e9,
                bytes=each.bytes,
            )
            for at_ns, body in self._migrators(now_ns)
            for each in body.migrations
        ]
        return sorted(rows, key=lambda row: (-row.age_s, row.sequence))

    def _migrators(self, now_ns: int) -> list[tuple[int, ServicePresence]]:
        """Return the last presence of each migrator that is alive, with the time at which it was heard."""
        return [
            (at_ns, body)
            for (role, _), (at_ns, body) in sorted(self._presences.items())
            if role == "migrator" and body.state is PresenceState.ALIVE and now_ns - at_ns <= SILENT_NS
        ]

    def totals(self, rows: list[InstanceRow]) -> Totals:
        heard = _heard(rows)
        return Totals(
            instances=len(rows),
            instances_ready=sum(row.state == "ready" for row in rows),
            preemptions=sum(row.preemptions for row in heard),
            migrations=sum(row.leaving for row in rows),
            **_sums(heard),
        )

    def _hear_summary(self, body: InstanceSummary, now_ns: int) -> None:
        heard = self._summaries.setdefault(body.instance, [])
        if heard and heard[-1][1].incarnation != body.incarnation:
            heard.clear()  # a new process counts its tokens from 0
        heard.append((now_ns, body))
        while len(heard) > 2 and heard[-1][1].at_ns - heard[1][1].at_ns >= RATE_NS:
            heard.pop(0)

    def _instance(self, name: str, now_ns: int) -> InstanceRow | None:
        heard = self._summaries.get(name)
        if not heard:
            record = self._records[name]
            return InstanceRow(
                state=self._gone(name, record.incarnation) or "starting",
                blocks_total=record.blocks_total,
                **self._known(name, record, now_ns),
            )
        at_ns, last = heard[-1]
        if now_ns - at_ns > GONE_NS and name not in self._records:
            return None
        return InstanceRow(
            state=self._state(last, now_ns - at_ns),
            running=last.running,
            waiting=last.waiting,
            blocks_used=last.blocks_total - last.blocks_free,
            blocks_total=last.blocks_total,
            output_tokens_per_s=_rate(heard[0][1], last),
            output_tokens=last.output_tokens_total,
            preemptions=last.preemptions,
            **self._known(name, last, now_ns),
        )

    def _state(self, last: InstanceSummary, silent_ns: int) -> str:
        if gone := self._gone(last.instance, last.incarnation):
            return gone
        if silent_ns > SUSPECT_NS:
            return "suspect"
        return "draining" if last.draining else "ready"

    def _gone(self, name: str, incarnation: int) -> str:
        """``dead`` or ``draining`` where that was said of this incarnation, else empty."""
        _, presence = self._presences.get(("worker", name), (0, None))
        if presence is None or (presence.incarnation and presence.incarnation < incarnation):
            return ""
        if presence.incarnation == 0 and presence.at_ns < incarnation:
            return ""
        return {PresenceState.DEAD: "dead", PresenceState.LEAVING: "draining"}.get(presence.state, "")

    def _known(self, instance: str, told: InstanceRecord | InstanceSummary, now_ns: int) -> dict[str, Any]:
        """Fields of an instance's row that do not depend on its load."""
        moves = [row for _, body in self._migrators(now_ns) for row in body.moving if row.instance == instance]
        counts = moves[0] if moves else InstanceMigrations(instance, 0)
        under_way = [each for _, body in self._migrators(now_ns) for each in body.migrations]
        plan, record = self._plans.get(told.model), self._records.get(instance)
        planned = plan.stages if plan else []
        roles = [stage.roles[instance] for stage in planned if instance in stage.roles]
        return {
            "instance": instance,
            "model": told.model,
            "stage": ",".join(stage.name for stage in planned if instance in stage.instances),
            "uptime_s": max(0, now_ns - told.incarnation) / 1e9,
            "role": str(roles[0]) if roles else str(InstanceRole.BOTH),
            "kv": [str(kind) for kind in record.kv.copiers] if record is not None and record.kv is not None else [],
            "kv_refusal": record.kv_refusal if record is not None else "",
            "shape": record.shape if record is not None else "",
            "leaving": counts.leaving,
            "arriving": sum(each.target == instance for each in under_way),
            "replicated": counts.replicated,
        }


def _stage_row(model: str, stage: Stage, bounds: tuple[int, int | None], rows: list[InstanceRow]) -> StageRow:
    own = _heard(row for row in rows if row.instance in stage.instances)
    return StageRow(
        model=model,
        stage=stage.name,
        length_min=bounds[0],
        length_max=bounds[1],
        covered_by=stage.covered_by,
        instances=len(own),
        leaving=sum(row.leaving for row in own),
        arriving=sum(row.arriving for row in own),
        **_sums(own),
    )


def _heard(rows: Iterable[InstanceRow]) -> list[InstanceRow]:
    return [row for row in rows if row.state in ("ready", "draining", "suspect")]


def _sums(rows: list[InstanceRow]) -> dict[str, Any]:
    return {name: sum(getattr(row, name) or 0 for row in rows) for name in LoadSums.__struct_fields__}


def _rate(first: InstanceSummary, last: InstanceSummary) -> float | None:
    if last.at_ns <= first.at_ns:
        return None
    return max(0, last.output_tokens_total - first.output_tokens_total) * 1e9 / (last.at_ns - first.at_ns)


def _natural(name: str) -> tuple[str, int, str]:
    """Sorts w2 before w10."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return stem, int(digits) if digits else -1, name
