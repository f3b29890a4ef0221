"""Validation of a cascade's table before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.actor.errors import ConfigError
from millrace.cluster.cascade_spec import CONFIDENCE, CascadeSpec
from millrace.policies.judges import JUDGES

#: Tiers of one cascade.
TIERS_MAX = 8

#: Parameters of every judge that asks a model; the others are the judge's own.
REMOTE: Mapping[str, type | tuple[type, ...]] = {
    "url": str,
    "model": str,
    "key_file": str,
    "timeout_s": (int, float),
}


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
    _check_judge(cascade, models)


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


def _check_judge(cascade: CascadeSpec, models: Sequence[str]) -> None:
    given = cascade.parameters
    if cascade.judge == CONFIDENCE:
        if given:
            raise ConfigError(f"cascade.parameters: the judge {cascade.judge} has none")
        return
    for key, kind in REMOTE.items():
        if key in given and not isinstance(given[key], kind):
            raise ConfigError(f"cascade.parameters.{key}: {given[key]!r}")
    own = {key: value for key, value in given.items() if key not in REMOTE}
    JUDGES.choose(cascade.judge, own, key="judge", table="cascade.")
    if "url" in given and not given["url"].startswith(("http://", "https://")):
        raise ConfigError("cascade.parameters.url: it begins with http:// or https://")
    if not given.get("model"):
        raise ConfigError(f"cascade.parameters.model: the judge {cascade.judge} needs one")
    if "url" not in given and given["model"] not in models:
        raise ConfigError(f"cascade.parameters.model: no such model {given['model']!r}; there are {', '.join(models)}")
