"""Builds the broker's actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.actor.deps import ActorDeps
from millrace.enginemodel.registered import load_step_times
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.telemetry import Telemetry

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


def with_step_times(config: BrokerConfig, deps: ActorDeps, telemetry: Telemetry) -> BrokerDeps:
    """Reads the step-time sets. One that cannot be read is logged and left out."""
    step_times, unreadable = load_step_times(config.step_times)
    for name, error in unreadable.items():
        telemetry.logger.error("step_time_unreadable", step_time=name, error=error)
    telemetry.logger.info("trading", policy=config.trading.policy, step_times=sorted(step_times))
    return BrokerDeps(**vars(deps), step_times=step_times)
