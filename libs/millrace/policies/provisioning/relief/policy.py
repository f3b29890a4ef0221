"""Relief: more instances once requests *were* too slow."""

from __future__ import annotations

from millrace.policies.provisioning.thresholds import Parameters, State, decide_by
from millrace.policies.provisioning.view import ProvisioningDecision, ProvisioningView

__all__ = ["Parameters", "State", "decide"]


def decide(
    view: ProvisioningView, parameters: Parameters, state: State, now_ns: int
) -> tuple[ProvisioningDecision, State]:
    """Compares the latencies of requests that completed with the threshold."""
    return decide_by(view.measured, "measured", view=view, parameters=parameters, state=state, now_ns=now_ns)
