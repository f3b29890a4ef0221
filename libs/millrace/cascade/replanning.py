"""Plans made again for changed traffic, at two speeds.

Thresholds for the present replicas cost nothing and can change at once. Replicas change only where the simulated gain
over a horizon, with draining and cold starts charged, is large enough.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import numpy as np

from millrace.cascade.capacity import NO_REPLICAS, TierDeployment
from millrace.cascade.judge_tier import judging_latency_s
from millrace.cascade.planner import JUDGED_REQUESTS_MIN, CascadeDesign, CascadePlanner, CascadeProblem
from millrace.cascade.replicas import NS, PERCENTILE
from millrace.cascade.routing import Routed, Thresholds, route, routings
from millrace.cascade.timeline import FOREVER_NS, PlacedReplica, Timeline, placed, run_timeline

#: Requests simulated of a horizon, at most; a longer one is cut, which counts against moving.
HORIZON_REQUESTS_MAX = 20_000

#: Share by which the p95 of a horizon may exceed the one asked for: a plan at the bound has other requests there, and
#: the move itself in it.
LATENCY_TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class MoveCost:
    """Cost of a change of replicas, and the least gain that justifies it.

    Attributes:
        drain_s: Until a retired replica's GPUs are free.
        cold_start_s: From then until a new replica takes requests.
        horizon_s: Time over which a plan is expected to hold.
        gain: Least reduction of p95 over the horizon, as a share, where a quality is asked for.
        points: Least rise of quality over the horizon where a latency is asked for.
        threshold_gain: Least reduction of p95, as a share, for which thresholds in force are changed. They cost
            nothing, but their latencies are simulated on some hundred requests.
    """

    drain_s: float = 30.0
    cold_start_s: float = 90.0
    horizon_s: float = 600.0
    gain: float = 0.1
    points: float = 1.0
    threshold_gain: float = 0.05


@dataclass(frozen=True, kw_only=True)
class Replan:
    """Decision on a plan: thresholds to apply at once, and the design to move to.

    Attributes:
        at_once: Thresholds for the present replicas; None where no thresholds serve the traffic on them.
        kept: Whether those are the ones in force, because no others are better by the simulation.
        move: The design to move to; None to keep the replicas.
        keep_p95_s, move_p95_s: Over the horizon, the move with its cost; NaN where not simulated.
        reason: One sentence.
    """

    at_once: CascadeDesign | None
    move: CascadeDesign | None
    kept: bool = False
    keep_p95_s: float = math.nan
    move_p95_s: float = math.nan
    reason: str = ""


def simulated_under(
    planner: CascadePlanner,
    thresholds: Thresholds,
    deployments: Sequence[TierDeployment],
    judge: TierDeployment = NO_REPLICAS,
) -> CascadeDesign | None:
    """A plan in force under the planner's sample and rate; None where no tier has a replica."""
    tiers = _served_tiers(deployments)
    routed = route(planner.problem.sample, thresholds, tiers=tiers) if tiers else None
    return None if routed is None else _under(planner, routed, deployments, judge)


def _served_tiers(deployments: Sequence[TierDeployment]) -> tuple[int, ...]:
    return tuple(tier for tier, deployment in enumerate(deployments) if deployment.replicas)


def outdated(planner: CascadePlanner, planned: CascadeDesign, *, worse: float = 0.1) -> str:
    """Return why a plan no longer fits the planner's traffic; empty if it still fits.

    Args:
        planned: With its p95 as planned.
        worse: Rise of p95 that counts, as a share.
    """
    now = simulated_under(planner, planned.routed.thresholds, planned.deployments, planned.judge)
    if now is None:
        return "no tier has a replica"
    if misses_quality(planner, now.routed):
        return f"quality is {now.routed.quality:.1f}, asked for {planner.problem.quality_min:g}"
    if now.p95_s > (1 + worse) * planned.p95_s:
        return f"p95 is {now.p95_s:.1f} s, planned {planned.p95_s:.1f} s"
    return ""


def misses_quality(planner: CascadePlanner, routed: Routed) -> bool:
    """Whether a plan in force gives less quality than asked for, beyond what the size of the sample explains.

    Plans are held to the mean of the sample they were made from, or to its lower confidence bound. On another sample
    of the same traffic half of all plans fall below the same bar; so the bar is one bound lower here.
    """
    wanted = planner.problem.quality_min
    margin = 0.0 if planner.problem.use_confidence else routed.quality - routed.quality_low
    return wanted is not None and routed.quality + margin < wanted


def better_than_in_force(planner: CascadePlanner, now: CascadeDesign, other: CascadeDesign, cost: MoveCost) -> bool:
    """Whether other thresholds on the same replicas are worth a change from those in force."""
    limit_s = planner.problem.latency_max_s
    if limit_s is not None:
        if now.p95_s > limit_s:
            return other.p95_s <= (1 - cost.threshold_gain) * now.p95_s
        return other.p95_s <= limit_s and other.routed.quality >= now.routed.quality + cost.points
    if misses_quality(planner, now.routed):
        return other.meets or other.routed.quality >= now.routed.quality + cost.points
    return other.meets and other.p95_s <= (1 - cost.threshold_gain) * now.p95_s


def thresholds_for(
    planner: CascadePlanner, deployments: Sequence[TierDeployment], judge: TierDeployment = NO_REPLICAS
) -> CascadeDesign | None:
    """The best thresholds on replicas as they are; None where there are none. Tiers without one are passed over.

    Routings that another one beats in quality and in the share of every tier are left out; the rest are simulated.

    Args:
        judge: Replicas of the judging model; without any, judging costs what it does by confidence.
    """
    tiers = _served_tiers(deployments)
    if not tiers:
        return None
    sample, most = planner.problem.sample, planner.problem.thresholds_most
    coarse = planner.best(_served(planner, deployments, routings(sample, most, tiers=tiers), judge))
    if coarse is None:
        return None
    return planner.best([coarse, *_served(planner, deployments, planner.near(coarse.routed), judge)])


def _served(
    planner: CascadePlanner,
    deployments: Sequence[TierDeployment],
    candidates: Sequence[Routed],
    judge: TierDeployment,
) -> list[CascadeDesign]:
    return [_under(planner, routed, deployments, judge) for routed in _not_dominated(candidates, planner)]


def _not_dominated(candidates: Sequence[Routed], planner: CascadePlanner) -> list[Routed]:
    kept: list[Routed] = []
    for routed in sorted(candidates, key=lambda each: (-planner.quality(each), sum(each.shares))):
        if not any(all(np.less_equal(other.shares, routed.shares)) for other in kept):
            kept.append(routed)
    return kept


def _under(
    planner: CascadePlanner, routed: Routed, deployments: Sequence[TierDeployment], judge: TierDeployment
) -> CascadeDesign:
    return planner.simulated(
        CascadeDesign(
            routed=routed,
            deployments=tuple(deployments),
            tier_latency_s=math.nan,
            judge=judge,
            judge_latency_s=judging_latency_s(planner.judge_tier(routed), judge),
        )
    )


def replan(
    planner: CascadePlanner,
    present: Sequence[TierDeployment],
    cost: MoveCost,
    *,
    in_force: Thresholds | None = None,
    judge: TierDeployment = NO_REPLICAS,
) -> Replan:
    """Thresholds for now, and whether to move to the best plan.

    Args:
        in_force: Present thresholds; they stay unless others are better by the same simulation. None for none.
        judge: Present replicas of the judging model.
    """
    at_once, kept = _thresholds_now(planner, (*present, judge), cost, in_force)
    return replace(_replicas_now(planner, (*present, judge), cost, at_once), kept=kept)


def _thresholds_now(
    planner: CascadePlanner, present: Sequence[TierDeployment], cost: MoveCost, in_force: Thresholds | None
) -> tuple[CascadeDesign | None, bool]:
    *tiers, judge = present
    best = thresholds_for(planner, tiers, judge)
    now = None if in_force is None else simulated_under(planner, in_force, tiers, judge)
    if now is None or (best is not None and better_than_in_force(planner, now, best, cost)):
        return best, False
    limit_s = planner.problem.latency_max_s
    meets = not misses_quality(planner, now.routed) and (limit_s is None or now.p95_s <= limit_s)
    return replace(now, meets=meets, reason="no thresholds are better than those in force"), True


def _replicas_now(
    planner: CascadePlanner, present: Sequence[TierDeployment], cost: MoveCost, at_once: CascadeDesign | None
) -> Replan:
    best = planner.plan()
    if best is None:
        return Replan(at_once=at_once, move=None, reason="no plan serves the traffic")
    if _counts(best.members) == _counts(present):
        return Replan(at_once=at_once, move=None, reason="the replicas are those of the best plan")
    if at_once is None:
        return Replan(at_once=None, move=best, reason="no thresholds serve the traffic on the present replicas")
    if best.meets and not at_once.meets:
        return Replan(at_once=at_once, move=best, reason="only the new replicas meet what is asked")
    if cost.horizon_s <= cost.drain_s + cost.cold_start_s:
        return Replan(at_once=at_once, move=None, reason="new replicas would not serve within the horizon")
    keep, move = _over_horizon(planner, at_once, at_once, cost), _over_horizon(planner, at_once, best, cost)
    told = (
        f"over {cost.horizon_s:g} s: p95 {keep.p95_s:.1f} s and quality {keep.quality:.1f} on the present replicas, "
        f"{move.p95_s:.1f} s and {move.quality:.1f} with the move in it"
    )
    chosen = best if _pays(keep, move, planner.problem, cost) else None
    return Replan(at_once=at_once, move=chosen, keep_p95_s=keep.p95_s, move_p95_s=move.p95_s, reason=told)


class HorizonFigures(NamedTuple):
    """Latency and quality of a cascade over a horizon."""

    p95_s: float
    quality: float


def _pays(keep: HorizonFigures, move: HorizonFigures, problem: CascadeProblem, cost: MoveCost) -> bool:
    if problem.quality_min is not None:
        kept = move.quality >= min(problem.quality_min, keep.quality)
        return kept and move.p95_s <= (1 - cost.gain) * keep.p95_s
    assert problem.latency_max_s is not None, "a problem asks for quality or for latency"
    limit_s = (1 + LATENCY_TOLERANCE) * problem.latency_max_s
    return move.p95_s <= max(limit_s, keep.p95_s) and move.quality >= keep.quality + cost.points


def _over_horizon(planner: CascadePlanner, now: CascadeDesign, then: CascadeDesign, cost: MoveCost) -> HorizonFigures:
    """A horizon that begins with the move from one design to another."""
    problem = planner.problem
    rng = Random(f"{planner.model.seed}/horizon")
    count = max(JUDGED_REQUESTS_MIN, min(HORIZON_REQUESTS_MAX, int(problem.rate * cost.horizon_s)))
    at, arrivals = 0.0, []
    for _ in range(count):
        at += rng.expovariate(problem.rate)
        arrivals.append(int(at * NS))
    rows = np.array([rng.randrange(problem.sample.count) for _ in range(count)])
    members, done_ns = moved(now.members, then.members, at_ns=0, cost=cost)
    verdict_s = max(now.judge_latency_s, then.judge_latency_s)
    timeline = Timeline(
        tiers=members[:-1],
        thresholds=[(0, now.routed.thresholds), (done_ns, then.routed.thresholds)],
        judge_s=[each + verdict_s for each in problem.judge_s],
    )
    outcomes = run_timeline(problem.sample.rows(rows), arrivals, timeline, native=planner.model.native)
    return HorizonFigures(float(np.percentile(outcomes.latency_s, PERCENTILE)), float(outcomes.quality.mean()))


class MovedTiers(NamedTuple):
    """Replicas of each tier over a move, and when the last new one takes requests, ns."""

    tiers: list[list[PlacedReplica]]
    done_ns: int


def moved(now: Sequence[TierDeployment], then: Sequence[TierDeployment], *, at_ns: int, cost: MoveCost) -> MovedTiers:
    """Replicas of each tier over a move from one design to another, as the coordinator carries it out.

    Others are retired until there are GPUs for the next new replica; with it start all that have GPUs by then, and take
    requests after drain and cold start; and then come the next ones. What both designs have stays.
    """
    return moved_replicas([placed(each) for each in now], then, at_ns=at_ns, cost=cost)


def moved_replicas(
    now: Sequence[Sequence[PlacedReplica]], then: Sequence[TierDeployment], *, at_ns: int, cost: MoveCost
) -> MovedTiers:
    """The same from replicas as they are, those that an earlier move has retired included."""
    tiers: list[list[PlacedReplica]] = []
    retiring: list[tuple[int, int]] = []
    starting: list[tuple[int, PlacedReplica]] = []
    for tier, (old, deployment) in enumerate(zip(now, then, strict=True)):
        left = Counter(dict(deployment.replicas))
        for index, replica in enumerate(old):
            if replica.until_ns < FOREVER_NS:
                continue
            if left[replica.shape] > 0:
                left[replica.shape] -= 1
            else:
                retiring.append((tier, index))
        for (shape, _), rate in zip(deployment.replicas, deployment.rates, strict=True):
            starting += [(tier, PlacedReplica(shape=shape, weight=rate))] * left[shape]
        tiers.append(list(old))
    done_ns = _as_devices_come_free(tiers, retiring, starting, at_ns, cost)
    return MovedTiers(tiers, done_ns)


def _as_devices_come_free(
    tiers: list[list[PlacedReplica]],
    retiring: Sequence[tuple[int, int]],
    starting: Sequence[tuple[int, PlacedReplica]],
    at_ns: int,
    cost: MoveCost,
) -> int:
    waiting, left = list(retiring), list(starting)
    free = max(0, _gpus(replica for _, replica in left) - _gpus(tiers[tier][index] for tier, index in waiting))

    def retire() -> int:
        tier, index = waiting.pop(0)
        tiers[tier][index] = replace(tiers[tier][index], until_ns=at_ns)
        return tiers[tier][index].shape.gpus

    while left:
        drained = 0.0
        while free < left[0][1].shape.gpus and waiting:
            free, drained = free + retire(), cost.drain_s
        at_ns += int((drained + cost.cold_start_s) * NS)
        together = True
        while left and together:
            tier, replica = left.pop(0)
            tiers[tier].append(replace(replica, from_ns=at_ns))
            free -= replica.shape.gpus
            together = bool(left) and left[0][1].shape.gpus <= free
    while waiting:
        retire()
    return at_ns


def _gpus(replicas: Iterable[PlacedReplica]) -> int:
    return sum(replica.shape.gpus for replica in replicas)


def _counts(deployments: Sequence[TierDeployment]) -> list[Counter[str]]:
    return [Counter({shape.name: count for shape, count in each.replicas}) for each in deployments]
