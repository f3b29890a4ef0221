"""Cascades of the configuration: checks, and the plan that holds until one is published."""

from __future__ import annotations

from collections.abc import Set

from millrace.actor.errors import ConfigError
from millrace.contracts.cascade import CascadePlan, CascadeTier

from services.ingress.cascade.entry import ENTRY_POLICIES
from services.ingress.config import CascadeConfig


def check_cascade(config: CascadeConfig, models: Set[str]) -> None:
    """Refuse a cascade that cannot be served.

    Raises:
        ConfigError: naming the cascade and what is wrong.
    """
    where = f"cascade {config.name}"
    if not config.name or config.name in models:
        raise ConfigError(f"{where}: a cascade needs a name that is not a model's")
    if config.entry not in ENTRY_POLICIES:
        raise ConfigError(f"{where}: entry {config.entry!r} is none of {', '.join(sorted(ENTRY_POLICIES))}")
    unknown = [tier.model for tier in config.tiers if tier.model not in models]
    if unknown:
        raise ConfigError(f"{where}: the model {unknown[0]} is not configured")
    if config.tiers:
        configured_plan(config)


def configured_plan(config: CascadeConfig) -> CascadePlan:
    """The plan of a configuration: fixed thresholds, each tier allowed, epoch 0.

    Raises:
        ConfigError: a threshold out of bounds, or a model twice.
    """
    tiers = [CascadeTier(model=tier.model, threshold=tier.threshold, instances=1) for tier in config.tiers]
    try:
        return CascadePlan(cascade=config.name, epoch=0, tiers=tiers, judge=config.judge, reason="configured")
    except ValueError as error:
        raise ConfigError(f"cascade {config.name}: {error}") from None
