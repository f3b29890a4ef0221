"""Builds the judge's actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.actor.deps import ActorDeps
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel

from services.judge.actor import JudgeActor
from services.judge.config import JudgeConfig
from services.judge.metrics import JudgeMetrics


@dataclass(frozen=True, kw_only=True)
class JudgeDeps(ActorDeps):
    """With what lies in files.

    Attributes:
        judges: Confidence judges by served model.
        curve: Calibration of the LLM judge; None for none.
    """

    judges: Mapping[str, ConfidenceModel] = field(default_factory=dict)
    curve: IsotonicCurve | None = None


def build(config: JudgeConfig, deps: JudgeDeps) -> JudgeActor:
    """The actor of a configuration."""
    return JudgeActor(
        config,
        incarnation=deps.incarnation,
        judges=deps.judges,
        curve=deps.curve,
        metrics=JudgeMetrics(deps.registry),
    )
