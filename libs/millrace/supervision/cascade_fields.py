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
    judging = {"judge_model": cascade.judging_model} if cascade.judging_model else {}
    if judging and "timeout_s" in cascade.parameters:
        judging["judge_timeout_s"] = cascade.parameters["timeout_s"]
    told = {"name": cascade.name, "tiers": _tiers(cascade), "judge": str(cascade.judge)}
    return {"cascades": [told | judging | shadows | cascade.settings]}


def coordinator_cascades(spec: ClusterSpec, judges: Mapping[str, str]) -> dict[str, Any]:
    """``cascades`` of the coordinator's configuration; empty without a cascade.

    Args:
        judges: File of the confidence judge of each model that has one, as the coordinator finds it.
    """
    cascade = spec.cascade
    if cascade is None:
        return {}
    tiers = [told | _instances(spec, told["model"], judges) for told in _tiers(cascade)]
    judging = cascade.judging_model
    judge = {"judge_tier": {"model": judging} | _instances(spec, judging, {})} if judging else {}
    target = {name: value for name in ("quality", "latency_s") if (value := getattr(cascade, name)) is not None}
    planned = target | ({"sample": cascade.sample, "period_s": cascade.period_s} if target else {})
    if instances_may_move(spec):
        planned |= {"moves": True, "hosts": list(dict.fromkeys(model.groups[0].host for model in spec.models))}
    return {"cascades": [{"name": cascade.name, "tiers": tiers, "judge": str(cascade.judge), **judge, **planned}]}


def _instances(spec: ClusterSpec, name: str, judges: Mapping[str, str]) -> dict[str, Any]:
    """Of a model of the cascade as the coordinator's configuration has it: its instances, and how they are judged."""
    model = next(model for model in spec.models if model.name == name)
    group = model.groups[0]
    told: dict[str, Any] = {"tensor_parallel": group.tensor_parallel, "device": group.device}
    if name in judges:
        told["judge"] = judges[name]
    if instances_may_move(spec):
        told["instances"] = len(instances_of(spec, model))
        told["instances_max"] = len(instances_of(spec, model, spares=True))
    return told


def instances_may_move(spec: ClusterSpec) -> bool:
    """Whether a plan of the cascade may have instances change their model: devices are counted, nobody else scales."""
    return bool(spec.cascade and spec.devices) and spec.policies.provisioning.name in ("", "none")


def judge_fields(
    spec: ClusterSpec, judges: Mapping[str, str], *, calibration: LlmCalibration | None = None
) -> dict[str, Any]:
    """Configuration of a judge.

    Args:
        judges: File of the confidence judge of each model that has one, as the judge finds it.
        calibration: Of the LLM judge's model; a file that the cascade names comes before it.
    """
    cascade = spec.cascade
    assert cascade is not None, "only a cascade has a judge"
    tiers = {model: judges[model] for model in cascade.tiers if model in judges}
    fields: dict[str, Any] = {"judges": tiers} if tiers else {}
    if cascade.judge is JudgeKind.LLM:
        curves: dict[str, Any] = {}
        if calibration is not None and "curve_file" not in cascade.parameters:
            of_models = {name: calibration.curves[name] for name in cascade.tiers if name in calibration.curves}
            curves = {"curve": msgspec.to_builtins(calibration.curve), "curves": msgspec.to_builtins(of_models)}
        return fields | {"llm": curves | cascade.parameters}
    if cascade.judge is JudgeKind.EXTERNAL:
        return fields | {"external": cascade.parameters}
    return fields


def with_judge(fields: dict[str, Any], model: ModelSpec, judges: Mapping[str, str]) -> dict[str, Any]:
    """A model's entry in ingress's configuration, with the file of its judge where it has one."""
    return fields | ({"judge": judges[model.name]} if model.name in judges else {})


def _tiers(cascade: CascadeSpec) -> list[dict[str, Any]]:
    pairs = zip(cascade.tiers, cascade.tier_thresholds, strict=True)
    return [{"model": model, "threshold": threshold} for model, threshold in pairs]
