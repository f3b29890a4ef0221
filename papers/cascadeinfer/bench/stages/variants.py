"""Variants that are switched on step by step: dispatch, trading, stages, hand-over, refinement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.policies.stages.membership import StageShape

from papers import PAPERS
from papers.cascadeinfer.bench.stages.setups import fixed, merged

Layer = Mapping[str, Any]

#: Reasons to move that no trading policy decides on.
STANDING = ("drain", "handoff", "boundary")

#: Boundaries stay where the plan has them.
FROZEN = {"sequences_min": 1_000_000_000}


def dispatch(policy: str, **parameters: Any) -> dict[str, Any]:
    """A dispatch policy without anything else."""
    return {"dispatch": {"policy": policy, "parameters": parameters}}


def trading(policy: str, *, reasons: Sequence[str] = (), refinement: Layer = FROZEN, **parameters: Any) -> Layer:
    """Moves by a trading policy; for all reasons where none are named."""
    trades = {"policy": policy, "parameters": parameters, "refinement": refinement}
    return {"migration": {"on": True}, "trading": trades | ({"reasons": list(reasons)} if reasons else {})}


def llumnix(**parameters: Any) -> Layer:
    """Llumnix's migration."""
    return trading(f"{PAPERS}/cascadeinfer/llumnix.py", reasons=["memory", "balance"], **parameters)


def arrival_only(shapes: Sequence[StageShape], sigma: float = 0.0) -> Layer:
    """Stages by the predicted final length, and nobody moves."""
    prediction = {"prediction": {"kind": "noisy", "sigma": sigma}, "dispatch": {"stage_by": "expected"}}
    return merged(fixed(shapes), prediction)


def hand_over(shapes: Sequence[StageShape]) -> Layer:
    """Stages by present length; who outgrows one moves on."""
    return merged(fixed(shapes), trading("none", reasons=STANDING))


def refined(shapes: Sequence[StageShape], method: str = "weighted") -> Layer:
    """The same with boundaries that follow the traffic."""
    return merged(fixed(shapes), trading("none", reasons=STANDING, refinement={"method": method}))


def full(shapes: Sequence[StageShape], *, refinement: Layer = FROZEN) -> Layer:
    """Stages whose instances also trade within a stage."""
    return merged(fixed(shapes), trading("delay", refinement=refinement))


def learnt(bounds: Layer, *, refinement: Layer = FROZEN) -> Layer:
    """Stages and hand-over as the coordinator plans them from the requests of the run, told the latency bounds."""
    planned = {"stages": {"policy": "exact", "parameters": {"bounds": bounds}}}
    return merged(planned, trading("none", reasons=STANDING, refinement=refinement))


#: Without stages.
BASELINES: Mapping[str, Layer] = {
    "round robin": dispatch("round_robin"),
    "shortest queue": dispatch("join_shortest_queue"),
    "Llumnix, no moves": dispatch(f"{PAPERS}/block/llumnix.py"),
    "Llumnix": merged(dispatch(f"{PAPERS}/block/llumnix.py"), llumnix()),
    "Llumnix, early": merged(dispatch(f"{PAPERS}/block/llumnix.py"), llumnix(freeness=1_000.0)),
    "forecast": dispatch("forecast"),
}

#: The best dispatch without stages, and what all staged variants dispatch by.
BASE = "shortest queue"


def steps(shapes: Sequence[StageShape]) -> dict[str, Layer]:
    """From no stages to everything, one thing switched on at a time."""
    return {
        "balance": trading("delay"),
        "arrival": arrival_only(shapes),
        "hand-over": hand_over(shapes),
        "+ refinement": refined(shapes),
        "+ trade": full(shapes, refinement={}),
        "trade, no refinement": full(shapes),
    }
