"""Preempt: more instances as soon as what is *predicted* for placements is too slow."""

from __future__ import annotations

from millrace.policies.provisioning.thresholds import Parameters, State, decide_by
from millrace.policies.provisioning.view import ProvisioningDecision, ProvisioningView

__all__ = ["Parameters", "State", "decide"]


def decide(
    view: ProvisioningView, parameters: Parameters, state: State, now_ns: int
) -> tuple[ProvisioningDecision, State]:
    """Compares the latencies that were forecast at placement with the threshold. Without forecasts it never scales
    out.
    """
    return decide_by(view.predicted, "predicted", view=view, parameters=parameters, state=state, now_ns=now_ns)
