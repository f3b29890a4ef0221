"""None: the cluster keeps the instances that it was given."""

from __future__ import annotations

from millrace.policies.provisioning.view import ProvisioningDecision, ProvisioningView
from millrace.policies.registry import Nothing


def decide(
    view: ProvisioningView, parameters: Nothing, state: Nothing, now_ns: int
) -> tuple[ProvisioningDecision, Nothing]:
    """Never anything."""
    return ProvisioningDecision(reason="provisioning is off"), state
