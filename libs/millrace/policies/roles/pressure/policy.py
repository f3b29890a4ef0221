"""Pressure: puts decodes first in steps that would take too long, and flips one instance where one phase misses its
objective and the other has capacity left, or one is idle, and the simulated mix is better.
"""

from __future__ import annotations

import math

import msgspec

from millrace.contracts.plan import InstanceRole
from millrace.policies.roles.flow import Pressures, Targets, chunk_of, member_of, present, simulate
from millrace.policies.roles.view import (
    Flip,
    RoleDecision,
    RoleInstance,
    RolesView,
    Scenario,
    StepOrder,
    may_take_role,
)


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions for a flip. Ranges are checked.

    Attributes:
        ttft_s, tpot_s: Objectives of a stage's requests, seconds.
        high: A phase above this share of its objective is overloaded.
        low: A phase below it has capacity left.
        idle: A phase below this share of its objective is idle.
        busy: A phase above this share is helped where the other one is idle, though it meets its objective.
        hold_s: Both must last for so long, seconds: faster rungs have had their turn then.
        margin: The simulated worst pressure must fall by this share.
        chunk_tokens: Prompt tokens that a step computes at most.
        step_share: Share of ``tpot_s`` that a step which carries prompts beside decodes may take: its tokens are
            bounded accordingly. 0 leaves steps alone.
        step_tokens_min: No step is bounded to fewer tokens.
        slowdown_max: Share of the prompt tokens per second that bounded steps may cost where prompts wait longer than
            ``ttft_s``.
        flips: Whether instances are flipped.
    """

    ttft_s: float = 3.0
    tpot_s: float = 0.05
    high: float = 1.0
    low: float = 0.6
    idle: float = 0.05
    busy: float = 0.4
    hold_s: float = 5.0
    margin: float = 0.1
    chunk_tokens: int = 2048
    step_share: float = 0.8
    step_tokens_min: int = 512
    slowdown_max: float = 0.1
    flips: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError where a value makes no sense."""
        checks = {
            "ttft_s": self.ttft_s > 0,
            "tpot_s": self.tpot_s > 0,
            "high": self.high > 0,
            "low": 0 <= self.low < self.high,
            "idle": 0 <= self.idle <= self.low,
            "busy": self.idle < self.busy <= self.high,
            "hold_s": self.hold_s >= 0,
            "margin": 0 <= self.margin < 1,
            "chunk_tokens": self.chunk_tokens >= 1,
            "step_share": self.step_share >= 0,
            "step_tokens_min": self.step_tokens_min >= 1,
            "slowdown_max": 0 <= self.slowdown_max < 1,
        }
        wrong = [name for name, holds in checks.items() if not holds]
        if wrong:
            raise ValueError(f"out of range: {', '.join(f'{name} = {getattr(self, name)}' for name in wrong)}")

    @property
    def targets(self) -> Targets:
        """Targets that pressures are relative to."""
        return Targets(
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            chunk_tokens=float(self.chunk_tokens),
            step_share=self.step_share,
            step_tokens_min=float(self.step_tokens_min),
            slowdown_max=self.slowdown_max,
        )


class State(msgspec.Struct, frozen=True):
    """Since when a phase has been overloaded while the other had capacity left.

    Attributes:
        side: ``prefill`` or ``decode``; empty for neither.
        since_ns: Unix ns.
    """

    side: str = ""
    since_ns: int = 0


def decide(view: RolesView, parameters: Parameters, state: State, now_ns: int) -> tuple[RoleDecision, State]:
    """Compare the pressures of both phases; see README.md."""
    decision, state = _roles(view, parameters, state, now_ns)
    ordered = priorities(view, parameters) if parameters.step_share else ()
    return (msgspec.structs.replace(decision, priorities=ordered) if ordered else decision), state


def priorities(view: RolesView, parameters: Parameters) -> tuple[StepOrder, ...]:
    """Instances whose steps are bounded: those that decode beside prompts, where a full step would take too long."""
    prompt = max(1.0, view.demand.prompt_tokens)
    found = []
    for each in view.instances:
        if not each.heard or each.model is None or not each.indicators.decoding:
            continue
        member = member_of(each, each.role)
        if not member.backlog and (not each.prefills or not view.demand.requests_per_s):
            continue
        limit = each.token_budget or parameters.chunk_tokens
        targets = msgspec.structs.replace(parameters, chunk_tokens=limit).targets
        tokens = math.ceil(member.decoding + chunk_of(member, prompt, targets))
        if tokens < limit:
            found.append(StepOrder(each.name, tokens))
    return tuple(found)


def _roles(view: RolesView, parameters: Parameters, state: State, now_ns: int) -> tuple[RoleDecision, State]:
    known = [each for each in view.instances if each.heard and each.model is not None]
    if len(known) < len(view.instances) or len(known) < 2:
        reason = "fewer than two instances" if len(view.instances) < 2 else "not all instances are heard and known"
        return RoleDecision(scenario=Scenario.UNKNOWN, unmended=len(view.instances) < 2, reason=reason), State()
    now = present(known, view.demand, parameters.targets)
    side = _overloaded(now, parameters) if parameters.flips else ""
    told = f"prefill at {now.prefill:.2f}, decode at {now.decode:.2f} of their objectives"
    if not side:
        both = min(now.prefill, now.decode) > parameters.high
        scenario = Scenario.EXTREME if both else Scenario.NORMAL
        unmended = now.worst > parameters.high
        return _decision(now, scenario, told, unmended=unmended), State()
    if state.side != side:
        return _decision(now, Scenario.IMBALANCED, f"{told}, since now"), State(side, now_ns)
    if now_ns - state.since_ns < round(parameters.hold_s * 1e9):
        return _decision(now, Scenario.IMBALANCED, f"{told}, not for {parameters.hold_s:g} s yet"), state
    return _flip(view, parameters, now, told, side), state


def _decision(now: Pressures, scenario: Scenario, reason: str, *, unmended: bool = False) -> RoleDecision:
    return RoleDecision(scenario=scenario, unmended=unmended, prefill=now.prefill, decode=now.decode, reason=reason)


def _overloaded(now: Pressures, parameters: Parameters) -> str:
    """The phase to help: it misses its objective and the other has capacity left, or it is busy and the other idle."""
    limits = ((parameters.high, parameters.low), (parameters.busy, parameters.idle))
    if any(now.prefill > above and now.decode < below for above, below in limits):
        return "prefill"
    if any(now.decode > above and now.prefill < below for above, below in limits):
        return "decode"
    return ""


def _flip(view: RolesView, parameters: Parameters, now: Pressures, told: str, side: str) -> RoleDecision:
    """The flip whose mix is simulated as the best, where that is better than the mix as it is."""
    stays = simulate(view.instances, {}, view.demand, parameters.targets).worst
    tried = [
        (simulate(view.instances, {flip.instance: flip.role}, view.demand, parameters.targets).worst, order, flip)
        for order, flip in enumerate(candidates(view, side))
    ]
    if not tried or min(tried)[0] > stays * (1 - parameters.margin):
        reason = f"{told}; no flip is simulated as better than staying ({stays:.2f})"
        return _decision(now, Scenario.IMBALANCED, reason, unmended=now.worst > parameters.high)
    worst, _, flip = min(tried)
    reason = f"{told}; {flip.instance} to {flip.role} is simulated at {worst:.2f}, staying at {stays:.2f}"
    return RoleDecision(
        flips=(flip,), scenario=Scenario.IMBALANCED, prefill=now.prefill, decode=now.decode, reason=reason
    )


def candidates(view: RolesView, side: str) -> list[Flip]:
    """Flips that help a phase: for each present role the instance with the least to lose, to each role that helps."""
    gives = InstanceRole.DECODE if side == "prefill" else InstanceRole.PREFILL
    gains = InstanceRole.PREFILL if side == "prefill" else InstanceRole.DECODE
    found = []
    for before, after in ((gives, gains), (gives, InstanceRole.BOTH), (InstanceRole.BOTH, gains)):
        able = [i for i in view.instances if i.role is before and i.movable and may_take_role(view, i.name, after)]
        if able:
            found.append(Flip(min(able, key=_work).name, after))
    return found


def _work(instance: RoleInstance) -> tuple[float, str]:
    """Return the work that a flip disturbs: tokens held here and prompts to compute."""
    told = instance.indicators
    return told.context_tokens + told.prefill_tokens_left, instance.name
