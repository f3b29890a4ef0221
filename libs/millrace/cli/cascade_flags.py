"""Options of `millrace up` about a cascade, read from the parsed command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from millrace.actor.settings import with_settings
from millrace.cli.errors import CliError
from millrace.cluster.cascade_spec import CONFIDENCE, CascadeSpec
from millrace.cluster.model_folders import model_folder

#: The model that ships as a judge.
JUDGE_MODEL = "millrace-judge"

#: Beginning of the settings that `cascade_of` reads.
PARAMETERS = "cascade.parameters"

#: Options that say nothing without --cascade.
_OF_CASCADE = ("thresholds", "judge")


def judge_model(arguments: argparse.Namespace) -> str:
    """Model of this cluster that judges, by name or folder; empty for none."""
    if not arguments.cascade or arguments.judge in (None, CONFIDENCE):
        return ""
    parameters = _parameters(arguments)
    return "" if "url" in parameters else str(parameters.get("model") or JUDGE_MODEL)


def cascade_of(arguments: argparse.Namespace, models: Sequence[str]) -> CascadeSpec | None:
    """The cascade that the options mean; None for none.

    Raises:
        CliError: naming the option.
    """
    if not arguments.cascade:
        stray = next((name for name in _OF_CASCADE if getattr(arguments, name) is not None), "")
        if stray:
            raise CliError(f"--{stray}: only together with --cascade")
        return None
    parameters, judge = _parameters(arguments), judge_model(arguments)
    return CascadeSpec(
        tiers=list(models),
        thresholds=_thresholds(arguments.thresholds),
        judge=arguments.judge or CONFIDENCE,
        parameters=parameters | ({"model": model_folder(judge).name} if judge else {}),
    )


def _parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those of the judge, as --set gives them: they decide whether the judge is a model of this cluster."""
    told = [setting for setting in arguments.set or [] if setting.startswith(PARAMETERS)]
    found = with_settings({}, told).get("cascade", {}).get("parameters", {})
    if not isinstance(found, dict):
        raise CliError(f"--set {PARAMETERS}: fields of the judge, such as {PARAMETERS}.model=NAME")
    return found


def _thresholds(text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise CliError(f"--thresholds {text}: numbers from 0 to 100, separated by commas") from None
