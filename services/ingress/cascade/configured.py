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
    if not 0.0 <= config.escalation_share_max <= 1.0:
        raise ConfigError(f"{where}: escalation_share_max {config.escalation_share_max} is not within 0 to 1")
    durations = ("judge_timeout_s", "tier_wait_s", "escalation_window_s")
    if min(getattr(config, name) for name in durations) <= 0:
        raise ConfigError(f"{where}: durations must be positive")
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
