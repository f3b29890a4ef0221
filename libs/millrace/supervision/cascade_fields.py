"""Fields of the services' configurations that follow from a cluster's cascade. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.cluster.cascade_spec import CascadeSpec, JudgeKind
from millrace.cluster.spec import ClusterSpec, ModelSpec
from millrace.cluster.workers import instances_of
from millrace.judging.files import LlmCalibration

#: Share of calls that run on every tier where a coordinator plans. At one request a second these are the 20 of each
#: side that a comparison of scores needs in 17 minutes; clients' p95 changes by less than 0.5 % (bench cascade_shadow).
SHADOW_SHARE = 0.02


def ingress_cascades(spec: ClusterSpec) -> dict[str, Any]:
    """``cascades`` of ingress's configuration; empty without a cascade."""
    cascade = spec.cascade
    if cascade is None:
        return {}
    planned = cascade.quality is not None or cascade.latency_s is not None
    shadows = {"shadow_share": SHADOW_SHARE} if planned else {}
    told = {"name": cascade.name, "tiers": _tiers(cascade), "judge": str(cascade.judge), **shadows, **cascade.settings}
    return {"cascades": [told]}


def coordinator_cascades(spec: ClusterSpec, judges: Mapping[str, str]) -> dict[str, Any]:
    """``cascades`` of the coordinator's configuration; empty without a cascade.

    Args:
        judges: File of the confidence judge of each model that has one, as the coordinator finds it.
    """
    cascade = spec.cascade
    if cascade is None:
        return {}
    groups = {model.name: model.groups[0] for model in spec.models}
    moves = instances_may_move(spec)
    first = {model.name: len(instances_of(spec, model)) for model in spec.models}
    most = {model.name: len(instances_of(spec, model, spares=True)) for model in spec.models}
    tiers = [
        tier
        | {"tensor_parallel": groups[tier["model"]].tensor_parallel, "device": groups[tier["model"]].device}
        | ({"judge": judges[tier["model"]]} if tier["model"] in judges else {})
        | ({"instances": first[tier["model"]], "instances_max": most[tier["model"]]} if moves else {})
        for tier in _tiers(cascade)
    ]
    target = {name: value for name in ("quality", "latency_s") if (value := getattr(cascade, name)) is not None}
    planned = target | ({"sample": cascade.sample, "period_s": cascade.period_s} if target else {})
    planned |= {"moves": True, "hosts": list(dict.fromkeys(g.host for g in groups.values()))} if moves else {}
    return {"cascades": [{"name": cascade.name, "tiers": tiers, "judge": str(cascade.judge), **planned}]}


def instances_may_move(spec: ClusterSpec) -> bool:
    """Whether a plan of the cascade may have instances change their model: devices are counted, nobody else scales."""
    return bool(spec.cascade and spec.devices) and spec.policies.provisioning.name in ("", "none")


def judge_fields(
    spec: ClusterSpec, judges: Mapping[str, str], *, api_url: str, calibration: LlmCalibration | None = None
) -> dict[str, Any]:
    """Configuration of a judge.

    Args:
        judges: File of the confidence judge of each model that has one, as the judge finds it.
        api_url: Base URL of this cluster's API, for the LLM judge.
        calibration: Of the LLM judge's model; a file that the cascade names comes before it.
    """
    cascade = spec.cascade
    assert cascade is not None, "only a cascade has a judge"
    tiers = {model: judges[model] for model in cascade.tiers if model in judges}
    fields: dict[str, Any] = {"judges": tiers} if tiers else {}
    if cascade.judge is JudgeKind.LLM:
        curve = {"curve": msgspec.to_builtins(calibration.curve)} if calibration is not None else {}
        return fields | {"llm": {"url": f"{api_url}/v1", **curve, **cascade.parameters}}
    if cascade.judge is JudgeKind.EXTERNAL:
        return fields | {"external": cascade.parameters}
    return fields


def with_judge(fields: dict[str, Any], model: ModelSpec, judges: Mapping[str, str]) -> dict[str, Any]:
    """A model's entry in ingress's configuration, with the file of its judge where it has one."""
    return fields | ({"judge": judges[model.name]} if model.name in judges else {})


def _tiers(cascade: CascadeSpec) -> list[dict[str, Any]]:
    pairs = zip(cascade.tiers, cascade.tier_thresholds, strict=True)
    return [{"model": model, "threshold": threshold} for model, threshold in pairs]
