"""Fields of the services' configurations that follow from a cluster's cascade. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.cluster.cascade_checks import REMOTE
from millrace.cluster.cascade_spec import CascadeSpec
from millrace.cluster.spec import ClusterSpec, ModelSpec
from millrace.cluster.workers import instances_of
from millrace.judging.files import LlmCalibration
from millrace.policies.registry import policy_name


def ingress_cascades(spec: ClusterSpec) -> dict[str, Any]:
    """``cascades`` of ingress's configuration; empty without a cascade."""
    cascade = spec.cascade
    if cascade is None:
        return {}
    told: dict[str, Any] = {"name": cascade.name, "tiers": _tiers(cascade), "judge": policy_name(cascade.judge)}
    if "timeout_s" in cascade.parameters:
        told["judge_timeout_s"] = cascade.parameters["timeout_s"]
    return {"cascades": [told | cascade.settings]}


def coordinator_cascades(spec: ClusterSpec, judges: Mapping[str, str]) -> dict[str, Any]:
    """``cascades`` of the coordinator's configuration; empty without a cascade.

    Args:
        judges: File of the confidence judge of each model that has one, as the coordinator finds it.
    """
    cascade = spec.cascade
    if cascade is None:
        return {}
    tiers = [told | _instances(spec, told["model"], judges) for told in _tiers(cascade)]
    target = {name: value for name in ("quality", "latency_s") if (value := getattr(cascade, name)) is not None}
    planned = target | ({"sample": cascade.sample, "period_s": cascade.period_s} if target else {})
    told = {"name": cascade.name, "tiers": tiers, "judge": policy_name(cascade.judge)}
    return {"cascades": [told | planned]}


def _instances(spec: ClusterSpec, name: str, judges: Mapping[str, str]) -> dict[str, Any]:
    """Of a model of the cascade as the coordinator's configuration has it: its instances, and how they are judged."""
    model = next(model for model in spec.models if model.name == name)
    told: dict[str, Any] = {"instances": len(instances_of(spec, model))}
    if name in judges:
        told["judge"] = judges[name]
    return told


def judge_fields(spec: ClusterSpec, url: str, *, calibration: LlmCalibration | None = None) -> dict[str, Any]:
    """Configuration of a judge.

    Args:
        spec: Has a cascade.
        url: Of the cluster's own API, for a judging model of this cluster.
        calibration: Of that model.
    """
    cascade = spec.cascade
    assert cascade is not None, "only a cascade has a judge"
    asked = {key: value for key, value in cascade.parameters.items() if key in REMOTE}
    own = {key: value for key, value in cascade.parameters.items() if key not in REMOTE}
    if calibration is not None and cascade.judge == "llm":
        curves = {name: calibration.curves[name] for name in cascade.tiers if name in calibration.curves}
        own = {"curve": msgspec.to_builtins(calibration.curve), "curves": msgspec.to_builtins(curves)} | own
    return {"url": url, "judge": cascade.judge, "parameters": own} | asked


def with_judge(fields: dict[str, Any], model: ModelSpec, judges: Mapping[str, str]) -> dict[str, Any]:
    """A model's entry in ingress's configuration, with the file of its judge where it has one."""
    return fields | ({"judge": judges[model.name]} if model.name in judges else {})


def _tiers(cascade: CascadeSpec) -> list[dict[str, Any]]:
    pairs = zip(cascade.tiers, cascade.tier_thresholds, strict=True)
    return [{"model": model, "threshold": threshold} for model, threshold in pairs]
