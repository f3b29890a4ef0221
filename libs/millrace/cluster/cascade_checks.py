"""Validation of a cascade's table before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.actor.errors import ConfigError
from millrace.cluster.cascade_spec import CascadeSpec

#: Tiers of one cascade.
TIERS_MAX = 8


def check_cascade(cascade: CascadeSpec, models: Sequence[str]) -> None:
    """Refuses a cascade that cannot be.

    Args:
        models: Served names of the cluster's models.

    Raises:
        ConfigError: beginning with the field, such as ``cascade.tiers``.
    """
    _check_tiers(cascade, models)
    _check_thresholds(cascade)
    _check_target(cascade)


def _check_tiers(cascade: CascadeSpec, models: Sequence[str]) -> None:
    name = cascade.name
    if not name or not name.isprintable() or any(c.isspace() or c in "*>/\\" for c in name):
        raise ConfigError(f"cascade.name {name!r}: a name has no white space, '*', '>' or '/'")
    if name in models:
        raise ConfigError(f"cascade.name {name!r}: a model has that name")
    if not 1 <= len(cascade.tiers) <= TIERS_MAX:
        raise ConfigError(f"cascade.tiers: {len(cascade.tiers)} models, must be between 1 and {TIERS_MAX}")
    for model in cascade.tiers:
        if model not in models:
            raise ConfigError(f"cascade.tiers: no such model {model!r}; there are {', '.join(models)}")
        if cascade.tiers.count(model) > 1:
            raise ConfigError(f"cascade.tiers: {model!r} is given twice")


def _check_thresholds(cascade: CascadeSpec) -> None:
    wanted = len(cascade.tiers) - 1
    if cascade.thresholds and len(cascade.thresholds) != wanted:
        raise ConfigError(
            f"cascade.thresholds: {len(cascade.thresholds)} given, but there is one per tier but the last, {wanted}"
        )


def _check_target(cascade: CascadeSpec) -> None:
    if cascade.quality is not None and cascade.latency_s is not None:
        raise ConfigError("cascade.latency_s: not together with cascade.quality; plans keep one and improve the other")
    field = "quality" if cascade.quality is not None else "latency_s" if cascade.latency_s is not None else ""
    if field and not cascade.sample:
        raise ConfigError(f"cascade.{field}: a target needs cascade.sample, recorded answers to plan from")
