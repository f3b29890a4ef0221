"""In which order stages are looked at for a sequence, and where their boundaries are now.

Stages come by distance from the sequence's length, and a full one spills to the next longer (policies/stages/routing).
Boundaries of the plan hold until their keepers tell refined ones; those count from the plan's boundary epoch on, so
that a change of membership keeps them and a change of the cuts voids them.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.contracts.broker import BoundaryMoved
from millrace.contracts.plan import Plan
from millrace.policies.dispatch.view import InstanceView
from millrace.policies.stages.routing import stage_order

from services.ingress.cluster.instances import StageCandidates


def in_order(stages: Sequence[StageCandidates], length_tokens: int) -> list[StageCandidates]:
    """Those that take new requests by distance, then those that only decode, likewise."""
    takers = [stage for stage in stages if not stage.decodes]
    decoders = [stage for stage in stages if stage.decodes]
    return stage_order(takers, length_tokens) + stage_order(decoders, length_tokens)


def first_with_room(
    found: Sequence[tuple[StageCandidates, tuple[InstanceView, ...]]], length_tokens: int
) -> tuple[InstanceView, ...]:
    """Candidates of the first stage that has room, among the covering one and longer ones; else of the first stage.

    Args:
        found: Stages that have candidates, in order.
        length_tokens: Of the sequence now.
    """
    for stage, candidates in found:
        longer = stage.length_max is None or length_tokens < stage.length_max
        if longer and not stage.decodes and any(not _full(view, length_tokens) for view in candidates):
            return candidates
    return found[0][1] if found else ()


def _full(view: InstanceView, length_tokens: int) -> bool:
    """Whether its KV cache cannot hold the sequence now, beside what waits and what is on its way."""
    if not view.known:
        return False
    return view.used_tokens + view.in_flight_tokens + view.waiting_prefill_tokens + length_tokens > view.total_tokens


class StageBoundaries:
    """Refined boundaries by model and lower stage; at most as many as the plans have cuts."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, BoundaryMoved]] = {}

    def take(self, body: BoundaryMoved, plan: Plan | None) -> bool:
        """Whether a boundary is of this plan and newer than the one known."""
        if plan is None or not plan.boundary_epoch <= body.plan_epoch <= plan.epoch:
            return False
        names = [stage.name for stage in plan.stages]
        if body.stage not in names[:-1] or body.next_stage != names[names.index(body.stage) + 1]:
            return False
        known = self._known.setdefault(body.model, {})
        before = known.get(body.stage)
        if before is not None and (before.plan_epoch, before.version) >= (body.plan_epoch, body.version):
            return False
        known[body.stage] = body
        return True

    def apply(self, plan: Plan, lists: Sequence[StageCandidates]) -> None:
        """Sets the ranges of a plan's stages: the plan's cuts, and over them the refined ones that fit between."""
        known = self._known.get(plan.model, {})
        for name in [n for n, each in known.items() if not plan.boundary_epoch <= each.plan_epoch <= plan.epoch]:
            del known[name]
        cuts = plan.present_cuts({name: body.length for name, body in known.items()})
        bounds: list[int | None] = [0, *cuts, None]
        at = {stage.name: index for index, stage in enumerate(plan.stages)}
        for each in lists:
            each.length_min, each.length_max = bounds[at[each.name]] or 0, bounds[at[each.name] + 1]
