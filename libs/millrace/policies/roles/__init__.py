"""Policies on roles by name: which instance prefills, which decodes, and which does both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from millrace.policies.roles.fixed import policy as fixed
from millrace.policies.roles.flowkv import policy as flowkv
from millrace.policies.roles.pressure import policy as pressure
from millrace.policies.roles.view import (
    Demand,
    Flip,
    RoleDecision,
    RoleInstance,
    RolesView,
    Scenario,
    StepOrder,
    may_take_role,
)

__all__ = [
    "ROLE_POLICIES",
    "Demand",
    "Flip",
    "RoleDecision",
    "RoleInstance",
    "RolePolicy",
    "RolesView",
    "Scenario",
    "StepOrder",
    "may_take_role",
]


class RolePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (view, parameters, state, now_ns) -> (RoleDecision, next state).
        parameters: Struct of its parameters; every field has a default.
        initial_state: State before the first decision.
        observes: Whether it looks at indicators.
    """

    name: str
    decide: Callable[[RolesView, Any, Any, int], tuple[RoleDecision, Any]]
    parameters: type[msgspec.Struct]
    initial_state: Any
    observes: bool = True


_ALL = (
    RolePolicy(
        name="fixed",
        decide=fixed.decide,
        parameters=fixed.Parameters,
        initial_state=fixed.State(),
        observes=False,
    ),
    RolePolicy(name="flowkv", decide=flowkv.decide, parameters=flowkv.Parameters, initial_state=flowkv.State()),
    RolePolicy(name="pressure", decide=pressure.decide, parameters=pressure.Parameters, initial_state=pressure.State()),
)

ROLE_POLICIES: Mapping[str, RolePolicy] = MappingProxyType({policy.name: policy for policy in _ALL})
