"""Provisioning policies by name: when a model gets more instances, and when fewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from millrace.policies.provisioning.none import policy as none
from millrace.policies.provisioning.preempt import policy as preempt
from millrace.policies.provisioning.relief import policy as relief
from millrace.policies.provisioning.view import InstanceLoad, LatencySample, ProvisioningDecision, ProvisioningView

__all__ = [
    "PROVISIONING_POLICIES",
    "InstanceLoad",
    "LatencySample",
    "ProvisioningDecision",
    "ProvisioningPolicy",
    "ProvisioningView",
]


class ProvisioningPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (view, parameters, state, now_ns) -> (Decision, next state).
        parameters: Struct of its parameters; every field has a default.
        initial_state: State before the first decision.
    """

    name: str
    decide: Callable[[ProvisioningView, Any, Any, int], tuple[ProvisioningDecision, Any]]
    parameters: type[msgspec.Struct]
    initial_state: Any


_ALL = (
    ProvisioningPolicy(name="none", decide=none.decide, parameters=none.Parameters, initial_state=none.State()),
    ProvisioningPolicy(
        name="preempt", decide=preempt.decide, parameters=preempt.Parameters, initial_state=preempt.State()
    ),
    ProvisioningPolicy(name="relief", decide=relief.decide, parameters=relief.Parameters, initial_state=relief.State()),
)

PROVISIONING_POLICIES: Mapping[str, ProvisioningPolicy] = MappingProxyType({p.name: p for p in _ALL})
