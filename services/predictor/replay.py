"""Builds the actor of a recording again, for `millrace replay`. Step-time files must still be where they were."""

from __future__ import annotations

import msgspec

from services.predictor.actor import PredictorActor
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics
from services.predictor.step_times import read_step_times


def replay_actor(config: str, seed: int) -> PredictorActor:
    """The actor as it was when the recording began; ``seed`` is its incarnation."""
    known = msgspec.json.decode(config, type=PredictorConfig)
    step_times, _ = read_step_times(known.step_times)
    return PredictorActor(config=known, incarnation=seed, step_times=step_times, metrics=PredictorMetrics())
