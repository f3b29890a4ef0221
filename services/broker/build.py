"""Builds the broker's actor."""

from __future__ import annotations

from millrace.hosting.step_times import StepTimeDeps

from services.broker.actor import BrokerActor
from services.broker.config import BrokerConfig
from services.broker.metrics import BrokerMetrics


def build(config: BrokerConfig, deps: StepTimeDeps) -> BrokerActor:
    """The actor of a configuration. Raises ConfigError where its trading policy is none."""
    return BrokerActor(
        config=config,
        incarnation=deps.incarnation,
        rng=deps.rng,
        step_times=deps.step_times,
        metrics=BrokerMetrics(deps.registry),
    )
