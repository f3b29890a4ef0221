"""FlowKV: scores of prefill and decode from weighted indicators, and three scenarios.

Source: FlowKV, Algorithm 1 and appendix B. The paper gives neither weights nor thresholds; the defaults are set by
hand, README.md has weights fitted to one kind of machine. Differs: "change priority" is the role BOTH, and the
terminate signal is the end of the imbalance.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from millrace.contracts.plan import InstanceRole
from millrace.policies.roles.view import Flip, RoleDecision, RoleInstance, RolesView, may_take_role

from papers.flowkv.indicators import DECODE_TERMS, PREFILL_TERMS, indicators_of_instance, score


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights in the order of PREFILL_TERMS and DECODE_TERMS, thresholds on scores, and a duration.

    Attributes:
        prefill_weights, decode_weights: Of L_r, L_w, L_sw, L_se, T_b, KV_u, G_u, MB_u.
        prefill_low, decode_low: Both scores up to these: normal load.
        prefill_high, decode_high: Both scores up to these, yet not normal: imbalanced load. Beyond: extreme.
        idle: An instance with a score below it is idle.
        extreme_s: An extreme load must last so long before it is told on, seconds.
    """

    prefill_weights: tuple[float, float, float, float, float, float, float, float] = (
        1.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0,
    )  # fmt: skip
    decode_weights: tuple[float, float, float, float, float, float, float, float] = (
        0.5, 1.0, 1.0, 0.0, 0.0, 0.5, 0.0, 0.0,
    )  # fmt: skip
    prefill_low: float = 0.6
    decode_low: float = 0.6
    prefill_high: float = 4.0
    decode_high: float = 4.0
    idle: float = 0.4
    extreme_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ValueError where thresholds are not in order."""
        if self.prefill_low > self.prefill_high or self.decode_low > self.decode_high:
            raise ValueError("prefill_low and decode_low must not exceed prefill_high and decode_high")
        if self.extreme_s < 0:
            raise ValueError(f"extreme_s must not be negative, is {self.extreme_s}")


class Scenario(StrEnum):
    """Load of a stage. Source: FlowKV, section 3.4."""

    UNKNOWN = "unknown"  # nothing was heard
    NORMAL = "normal"
    IMBALANCED = "imbalanced"  # one phase has more than it can handle, the other has capacity left
    EXTREME = "extreme"  # more, or far less, than all can handle: a matter of the number of instances


class State(msgspec.Struct, frozen=True):
    """Since when the load has been extreme, unix ns; 0 while it is not."""

    extreme_ns: int = 0


def decide(view: RolesView, parameters: Parameters, state: State, now_ns: int) -> tuple[RoleDecision, State]:
    """Judge the scenario and flip by it."""
    prefill = _mean([prefill_score(i, parameters) for i in view.instances if i.summaries and i.prefills])
    decode = _mean([decode_score(i, parameters) for i in view.instances if i.summaries and i.decodes])
    if prefill is None or decode is None:
        return RoleDecision(reason="unknown: no loads are heard"), State()
    told = f"scores: prefill {prefill:.2f}, decode {decode:.2f}"
    if prefill <= parameters.prefill_low and decode <= parameters.decode_low:
        return RoleDecision(flips=_homewards(view), reason=f"{Scenario.NORMAL}: {told}"), State()
    if prefill <= parameters.prefill_high and decode <= parameters.decode_high:
        return RoleDecision(flips=_helpers(view, parameters), reason=f"{Scenario.IMBALANCED}: {told}"), State()
    since_ns = state.extreme_ns or now_ns
    lasting = "lasting, " if now_ns - since_ns >= round(parameters.extreme_s * 1e9) else ""
    return RoleDecision(reason=f"{Scenario.EXTREME}: {lasting}{told}"), State(since_ns)


def prefill_score(instance: RoleInstance, parameters: Parameters) -> float:
    """C_i^p (Algorithm 1, line 10)."""
    return score(indicators_of_instance(instance), PREFILL_TERMS, parameters.prefill_weights)


def decode_score(instance: RoleInstance, parameters: Parameters) -> float:
    """C_i^d (line 11)."""
    return score(indicators_of_instance(instance), DECODE_TERMS, parameters.decode_weights)


def _helpers(view: RolesView, parameters: Parameters) -> tuple[Flip, ...]:
    """Idle instances of one phase help in the other (lines 25 to 27)."""
    found = []
    for each in view.instances:
        if not each.summaries or not each.movable or each.role is InstanceRole.BOTH:
            continue
        own = prefill_score if each.role is InstanceRole.PREFILL else decode_score
        if own(each, parameters) < parameters.idle:
            found.append(Flip(each.name, InstanceRole.BOTH))
    return tuple(found)


def _homewards(view: RolesView) -> tuple[Flip, ...]:
    """Helpers go back to their own role, one at a time."""
    away = [i for i in view.instances if i.role is not i.home and i.movable and may_take_role(view, i.name, i.home)]
    return tuple(Flip(each.name, each.home) for each in away[:1])


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
