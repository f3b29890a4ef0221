"""Builds the broker's actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.actor.deps import ActorDeps
from millrace.enginemodel.step_time_models import StepTimeModel

from services.broker.actor import BrokerActor
from services.broker.config import BrokerConfig
from services.broker.metrics import BrokerMetrics


@dataclass(frozen=True, kw_only=True)
class BrokerDeps(ActorDeps):
    """Dependencies of a broker beside its configuration.

    Attributes:
        step_times: Step-time models by the name that instances give in their record.
    """

    step_times: Mapping[str, StepTimeModel]


def build(config: BrokerConfig, deps: BrokerDeps) -> BrokerActor:
    """The actor of a configuration. Raises ConfigError where its trading policy is none."""
    return BrokerActor(
        config=config,
        incarnation=deps.incarnation,
        rng=deps.rng,
        step_times=deps.step_times,
        metrics=BrokerMetrics(deps.registry),
    )
