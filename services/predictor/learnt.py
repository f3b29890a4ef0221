"""Statistics of one model's requests, learnt from outcomes."""

from __future__ import annotations

from dataclasses import dataclass

from services.predictor.config import PredictorConfig
from services.predictor.lengths import LearntLengths
from services.predictor.outlook import Outlook


@dataclass(slots=True)
class Learnt:
    """Attributes: lengths: of outputs; outlook: what comes later than forecasts say."""

    lengths: LearntLengths
    outlook: Outlook


def nothing_learnt(config: PredictorConfig) -> Learnt:
    """Initial statistics of an unseen model."""
    return Learnt(LearntLengths(config), Outlook(enabled=config.calibrate))
