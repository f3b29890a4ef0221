"""The plan that the coordinator publishes in the KV bucket ``plan`` (key: model), and its lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from millrace.contracts.message import Body


class InstanceRole(StrEnum):
    """Role of an instance in its stage."""

    BOTH = "both"
    PREFILL = "prefill"  # takes new requests and hands each over after its first token
    DECODE = "decode"  # takes no new requests as long as others can; goes on with those that are handed over


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Instances that serve one range of sequence lengths.

    Attributes:
        name: For example ``s0``.
        length_min: First length served, tokens.
        length_max: First length no longer served; None for no bound.
        instances: Names, sorted.
        roles: Of those instances whose role is not BOTH.
        instances_wanted: Number of instances that the planner gave it. Membership changes leave it as it is.
        covered_by: Name of the stage that serves this range while no instance is here; empty otherwise.
    """

    name: str
    length_min: int
    length_max: int | None
    instances: list[str]
    roles: dict[str, InstanceRole] = {}
    instances_wanted: int = 0
    covered_by: str = ""


class StageExpectation(msgspec.Struct, frozen=True, kw_only=True):
    """Load that the planner expects in one stage.

    Attributes:
        step_ns: Mean time per output token.
        sequences: Mean running sequences per instance.
        kv_used: Mean share of the KV blocks in use, 0 to 1.
        arrivals_per_s: New requests per second for the whole stage.
        moves_per_s: Sequences per second that grow into the stage, for the whole stage.
    """

    step_ns: int
    sequences: float
    kv_used: float
    arrivals_per_s: float
    moves_per_s: float


class PlanExpectation(msgspec.Struct, frozen=True, kw_only=True):
    """Result that the planner expects, so that it can be compared with what happens.

    Attributes:
        cost: Value of the objective; its unit is the objective's. Lower is better.
        one_stage_cost: The same with one stage over all lengths and the same instances.
        requests: Requests that the statistics are from.
        requests_per_s: Their rate.
        stages: In the plan's order. Empty where the objective does not model load.
    """

    cost: float
    one_stage_cost: float
    requests: int
    requests_per_s: float
    stages: list[StageExpectation] = []


class AdoptionPhase(StrEnum):
    """Phase of an adoption. Closed set."""

    SWITCHING = "switching"  # processes change to the adopted settings
    WATCHED = "watched"  # the next window decides
    KEPT = "kept"
    RETURNING = "returning"  # processes change to the former settings
    RETURNED = "returned"
    OVERRULED = "overruled"  # a person applied something else


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the autopilot put in force.

    Attributes:
        settings, before: The same keys, as in Advice: as adopted, and as they were.
        at_ns: When they were adopted, unix ns.
        until_ns: Of one that was taken back: it is not adopted again before, unix ns.
        pause_ns: How long that is.
        evidence: One sentence: why it is in this phase.
        recorded: Figures of the former settings at that time, the share within the objectives (``within``) and the rate
            of requests among them.
        missed: The same, replayed over recorded; of the share the difference.
    """

    settings: str
    before: str
    phase: AdoptionPhase = AdoptionPhase.SWITCHING
    at_ns: int = 0
    until_ns: int = 0
    pause_ns: int = 0
    evidence: str = ""
    recorded: dict[str, float] = {}
    missed: dict[str, float] = {}


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Other settings of the cluster, by replays of the last windows of its load.

    Attributes:
        settings: Keys that would have been better, ``KEY=VALUE`` with blanks in between; empty for none.
        evidence: One sentence: by how much and why, or why there is nothing to advise.
        adopted: What was put in force, and what became of it.
    """

    settings: str = ""
    evidence: str = ""
    adopted: list[Adoption] = []


class Plan(Body, frozen=True, kw_only=True, tag="Plan/1"):
    """Stages of a model, with the range of lengths that each covers and the instances that serve it.

    Invariants, checked at construction and therefore on decoding (ValueError): the ranges tile [0, inf) in order, stage
    names are unique, each instance belongs to one stage, and a stage without instances names the stage that covers it
    unless no instance is left at all.

    Attributes:
        epoch: Rises by one with each change.
        coordinator: Name of the author.
        boundary_epoch: Epoch at which the present cuts were set. A refined boundary of this epoch or a later one
            replaces the plan's; an older one is void. A change of membership alone keeps it.
        policy: Name of the stage policy.
        reason: One sentence: why this plan and not the one before.
        expects: None where the policy expects nothing.
        role_orders: Roles that an operator ordered, by instance. They replace the configured ones, and the next
            coordinator takes them over.
        advice: None where nothing was replayed. Of a cluster with several models, it stands in the plan of one.
    """

    model: str
    epoch: int
    stages: list[Stage]
    coordinator: str
    boundary_epoch: int = 0
    policy: str = ""
    reason: str = ""
    expects: PlanExpectation | None = None
    role_orders: dict[str, InstanceRole] = {}
    advice: Advice | None = None

    def __post_init__(self) -> None:
        check_stages(self.stages)
        if not 0 <= self.boundary_epoch <= self.epoch:
            raise ValueError(f"boundary_epoch {self.boundary_epoch} is not within 0 to {self.epoch}, the epoch")

    @property
    def cuts(self) -> list[int]:
        """Lengths at which one stage ends and the next begins, rising; one fewer than stages."""
        return [stage.length_min for stage in self.stages[1:]]

    def present_cuts(self, refined: Mapping[str, int]) -> list[int]:
        """Its cuts, and over them those that keepers have refined; strictly rising.

        Keepers refine at the same time, so that two boundaries may cross, and messages come in any order. Whoever
        knows the same boundaries gets the same cuts: one that crosses its neighbour counts as little as that neighbour.

        Args:
            refined: Boundaries by the name of the lower stage.
        """
        standing = {index: refined[s.name] for index, s in enumerate(self.stages[:-1]) if s.name in refined}
        while True:
            cuts = [standing.get(index, cut) for index, cut in enumerate(self.cuts)]
            bounds = [0, *cuts]
            crossed = next((at for at in range(len(cuts)) if bounds[at] >= bounds[at + 1]), None)
            if crossed is None:
                return cuts
            standing.pop(crossed, None)
            standing.pop(crossed - 1, None)


def check_stages(stages: Sequence[Stage]) -> None:
    """Raises ValueError, naming the field, where stages do not tile all lengths or do not partition the instances."""
    if not stages:
        raise ValueError("stages is empty: one stage at least covers all lengths")
    _check_ranges(stages)
    names = [stage.name for stage in stages]
    _refuse_repeated(names, "stages name")
    _refuse_repeated([name for stage in stages for name in stage.instances], "instance")
    held = {stage.name for stage in stages if stage.instances}
    for stage in stages:
        _check_members(stage, held)


def _check_ranges(stages: Sequence[Stage]) -> None:
    expected: int | None = 0
    for stage in stages:
        if stage.length_min != expected:
            kind = "overlaps" if expected is None or stage.length_min < expected else "leaves a gap after"
            raise ValueError(f"stage {stage.name}: length_min {stage.length_min} {kind} the stage before ({expected})")
        if stage.length_max is not None and stage.length_max <= stage.length_min:
            raise ValueError(f"stage {stage.name}: length_max {stage.length_max} is not above {stage.length_min}")
        expected = stage.length_max
    if expected is not None:
        raise ValueError(f"stage {stages[-1].name}: length_max {expected}, but the last stage has no bound")


def _check_members(stage: Stage, held: set[str]) -> None:
    strangers = sorted(set(stage.roles) - set(stage.instances))
    if strangers:
        raise ValueError(f"stage {stage.name}: roles names {strangers[0]}, which is not among its instances")
    if stage.instances_wanted < 0:
        raise ValueError(f"stage {stage.name}: instances_wanted {stage.instances_wanted} is negative")
    if stage.instances and stage.covered_by:
        raise ValueError(f"stage {stage.name}: covered_by {stage.covered_by}, but it has instances")
    if not stage.instances and held and stage.covered_by not in held:
        covered_by = stage.covered_by or "no stage"
        raise ValueError(f"stage {stage.name}: instances is empty and covered_by names {covered_by}")


def _refuse_repeated(names: Sequence[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name} stands twice in a plan")
        seen.add(name)


class Lease(Body, frozen=True, kw_only=True, tag="Lease/1"):
    """Lease of the active coordinator of a model (KV bucket ``lease``, key: model). It is held until ``until_ns``; then
    anyone may take it by CAS.
    """

    model: str
    holder: str
    incarnation: int
    until_ns: int
