"""Provisioning policies by name: when a model gets more instances, and when fewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.policies.provisioning.none import policy as none
from millrace.policies.provisioning.preempt import policy as preempt
from millrace.policies.provisioning.relief import policy as relief
from millrace.policies.provisioning.view import InstanceLoad, LatencySample, ProvisioningDecision, ProvisioningView
from millrace.policies.registry import Policy, Registry

__all__ = [
    "PROVISIONING_POLICIES",
    "InstanceLoad",
    "LatencySample",
    "ProvisioningDecision",
    "ProvisioningPolicy",
    "ProvisioningView",
]


class ProvisioningPolicy(Policy, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (view, parameters, state, now_ns) -> (Decision, next state).
    """

    decide: Callable[[ProvisioningView, Any, Any, int], tuple[ProvisioningDecision, Any]]
    initial_state: Any


#: To add a policy: its folder, its import above and a word here.
PROVISIONING_POLICIES = Registry("provisioning", ProvisioningPolicy, (none, preempt, relief))
