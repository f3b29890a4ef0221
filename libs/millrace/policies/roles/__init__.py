"""Policies on roles by name: which instance prefills, which decodes, and which does both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.policies.registry import Policy, Registry
from millrace.policies.roles.fixed import policy as fixed
from millrace.policies.roles.view import Flip, RoleDecision, RoleInstance, RolesView, may_take_role

__all__ = [
    "ROLE_POLICIES",
    "Flip",
    "RoleDecision",
    "RoleInstance",
    "RolePolicy",
    "RolesView",
    "may_take_role",
]


class RolePolicy(Policy, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (view, parameters, state, now_ns) -> (RoleDecision, next state).
        observes: Whether it looks at summaries.
    """

    decide: Callable[[RolesView, Any, Any, int], tuple[RoleDecision, Any]]
    initial_state: Any
    observes: bool = True


#: The one that ships changes no role under load: flips lost against instances that do both, on every load measured.
ROLE_POLICIES = Registry("roles", RolePolicy, (fixed,))
