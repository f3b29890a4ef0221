"""Ends a run whose dispatch policy raises: live the fallback decides and a line is logged, here the author wants it."""

from __future__ import annotations

from millrace.actor.effects import Log
from millrace.actor.ports import NullTelemetry
from millrace.sim.failure import SimulationFailed

#: What an ingress logs of a policy that raised, or that chose no candidate.
EVENT = "policy_failed"


class PolicyFailed(SimulationFailed):
    """A dispatch policy raised or returned what is no decision. The message names its file and line."""


class PolicyFaultSink(NullTelemetry):
    """Discards logs and spans, but for policies that fail.

    Raises:
        PolicyFailed: from ``log``.
    """

    def log(self, actor: str, effect: Log) -> None:
        """Takes a line."""
        if effect.event == EVENT:
            fields = effect.fields
            raise PolicyFailed(f"policy {fields.get('policy')}: {fields.get('where')}: {fields.get('error')}")
