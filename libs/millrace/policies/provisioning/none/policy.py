"""None: the cluster keeps the instances that it was given."""

from __future__ import annotations

import msgspec

from millrace.policies.provisioning.view import ProvisioningDecision, ProvisioningView


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """There are none."""


class State(msgspec.Struct, frozen=True):
    """Nothing to remember."""


def decide(
    view: ProvisioningView, parameters: Parameters, state: State, now_ns: int
) -> tuple[ProvisioningDecision, State]:
    """Never anything."""
    return ProvisioningDecision(reason="provisioning is off"), state
