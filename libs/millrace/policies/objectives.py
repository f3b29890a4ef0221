"""The latencies that requests of a cluster shall keep: what advice on its settings is measured by. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from millrace.policies.stages.risks import LatencyBounds
from millrace.policies.step_bounds import StepObjectives

#: Objectives over latencies without load, where none are configured. Planners of stages take the same for TPOT.
FACTOR = 5.0

#: Source of those.
UNLOADED = f"{FACTOR:g} times the latencies of a request that is alone"


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that a request shall keep, ms.

    Attributes:
        source: Who says so.
    """

    ttft_ms: float
    tpot_ms: float
    source: str

    def __str__(self) -> str:
        return f"TTFT {self.ttft_ms:.4g} ms and TPOT {self.tpot_ms:.4g} ms"


def configured_objectives(stages: Mapping[str, Any], steps: StepObjectives) -> Objectives | None:
    """Those of the stages' policy; else of step bounds, where they are on; None for UNLOADED.

    Args:
        stages: The policy's parameters.
    """
    with suppress(msgspec.ValidationError):  # a policy of one's own may call something else so
        bounds = msgspec.convert(stages.get("bounds") or {}, LatencyBounds)
        if bounds.tpot_ms:
            return Objectives(
                ttft_ms=bounds.ttft_ms, tpot_ms=bounds.tpot_ms, source="policies.stages.parameters.bounds"
            )
    if steps.tpot_s:
        return Objectives(ttft_ms=steps.ttft_s * 1e3, tpot_ms=steps.tpot_s * 1e3, source="coordinator.step_bounds")
    return None


def objectives_text(objectives: Objectives | None) -> str:
    """For operators."""
    return f"{objectives} ({objectives.source})" if objectives is not None else UNLOADED
