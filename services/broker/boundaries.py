"""Boundaries that are kept here: one keeper per cut, an instance of the lower stage chosen by rendezvous hashing.

Every broker of the stage hears the same loads, so each knows by itself who the keeper is; when that one falls silent
the next one goes on from the last boundary that it heard. For a moment two may speak: both refine the same boundary by
a bounded step, and the later one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from millrace.actor.effects import Effect, Publish
from millrace.contracts.broker import BoundaryMoved
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.subjects import subject_token
from millrace.policies.stages.digest import LengthDigest, merged
from millrace.policies.stages.refinement import BoundaryView, refine

from services.broker.loads import digest_of
from services.broker.state import MS, BrokerContext, OwnInstance

#: A boundary that stays is told again after so long, for whoever has not heard it.
TOLD_AGAIN_NS = 10_000 * MS


class Boundaries:
    """Refines the boundaries that instances of ours keep."""

    def __init__(self, ctx: BrokerContext) -> None:
        self._ctx = ctx
        self._next_ns: dict[tuple[str, str], int] = {}  # by (model, stage)
        self._told: dict[tuple[str, str], tuple[int, int, int]] = {}  # by (model, stage): plan, version, when
        self._first: dict[tuple[str, str], tuple[int, tuple[int, str]]] = {}  # by (model, stage): when, who

    def look(self, own: OwnInstance, now_ns: int) -> list[Effect]:
        """One round for the cut above an instance's stage, where it is the keeper and the round is due."""
        record, stage, above = self._ctx.view.record(own.instance), None, None
        if record is not None and self._ctx.fresh(own, now_ns):
            stage, above = self._ctx.view.stage(own.instance), self._ctx.view.next_stage(own.instance)
        plan = self._ctx.view.plan(record.model) if record is not None else None
        if record is None or stage is None or above is None or plan is None:
            return []
        key = (record.model, stage.name)
        if now_ns < self._next_ns.get(key, 0) or self._keeper(own, key, stage, now_ns) != own.instance:
            return []
        self._next_ns[key] = now_ns + self._ctx.limits.boundary_ms * MS
        return self._round(own, plan, stage, above, now_ns)

    def _keeper(self, own: OwnInstance, key: tuple[str, str], stage: Stage, now_ns: int) -> str:
        """Instance that keeps the boundary above the stage, chosen among those that are heard."""
        known = self._first.get(key)
        if known is None or known[0] != now_ns:  # the same for all our instances of the stage: once per tick
            heard = (_rank(stage, name) for name in stage.instances if self._ctx.view.load(name, now_ns))
            known = self._first[key] = (now_ns, max(heard, default=(-1, "")))
        return max(known[1], _rank(stage, own.instance))[1]

    def _round(self, own: OwnInstance, plan: Plan, stage: Stage, above: Stage, now_ns: int) -> list[Effect]:
        view = self._view(own, plan, stage, above, now_ns)
        if view is None:
            return []
        refined = refine(view, self._ctx.config.refinement)
        known = self._ctx.view.refined(plan.model, stage.name)
        moved = refined.cut != view.cut
        self._ctx.metrics.boundaries.add("moved" if moved else "stays")
        body = BoundaryMoved(
            model=plan.model,
            stage=stage.name,
            next_stage=above.name,
            length=refined.cut,
            plan_epoch=plan.epoch,
            version=(known.version if known is not None else 0) + moved,
            keeper=own.instance,
            at_ns=now_ns,
            why=refined.reason,
        )
        self._ctx.view.on_boundary(body)
        key, (epoch, version, told_ns) = (plan.model, stage.name), self._told.get((plan.model, stage.name), (-1, -1, 0))
        if (epoch, version) == (body.plan_epoch, body.version) and now_ns - told_ns < TOLD_AGAIN_NS:
            return []
        self._told[key] = (body.plan_epoch, body.version, now_ns)
        return [Publish(subject=self._ctx.subjects.boundary(plan.model, stage.name), body=body)]

    def _view(self, own: OwnInstance, plan: Plan, stage: Stage, above: Stage, now_ns: int) -> BoundaryView | None:
        cut = self._ctx.view.boundary_above(plan.model, stage)
        lower, upper = self._digests(stage, now_ns), self._digests(above, now_ns)
        if cut is None or not lower or not upper:
            return None
        index = plan.stages.index(stage)
        below = self._ctx.view.boundary_above(plan.model, plan.stages[index - 1]) if index else None
        return BoundaryView(
            cut=cut,
            cut_below=below or 0,
            cut_above=self._ctx.view.boundary_above(plan.model, above),
            lower=merged(lower),
            upper=merged(upper),
            lower_instances=len(lower),
            upper_instances=len(upper),
        )

    def _digests(self, stage: Stage, now_ns: int) -> Sequence[LengthDigest]:
        """Of every instance of a stage that is heard; an absurd one counts as none."""
        found: list[LengthDigest] = []
        for name in stage.instances:
            known = self._ctx.view.heard(name, now_ns)
            if known is None:
                continue
            try:
                found.append(digest_of(known.told))
            except ValueError:
                self._ctx.metrics.refused.add("absurd")
        return found

    def load_subjects(self, own: OwnInstance) -> set[str]:
        """Loads that an instance's broker listens to: of its own stage and of the next one."""
        record, stage = self._ctx.view.record(own.instance), self._ctx.view.stage(own.instance)
        if record is None:
            return set()
        names = [stage.name] if stage is not None else [UNPLANNED]
        above = self._ctx.view.next_stage(own.instance)
        names += [above.name] if above is not None else []
        return {self._ctx.subjects.load(record.model, name) for name in names}


def _rank(stage: Stage, instance: str) -> tuple[int, str]:
    return crc32(f"{stage.name}/{instance}".encode()), instance


#: Stands for the stage of instances that are in no plan.
UNPLANNED = subject_token("unplanned")
