"""Options of `millrace up` about a cascade."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from millrace.cli.errors import CliError
from millrace.cluster import CascadeSpec, JudgeKind
from millrace.cluster.cascade_spec import CASCADE_NAME
from millrace.cluster.model_folders import model_folder

#: The model that ships as a judge.
JUDGE_MODEL = "millrace-judge"

#: Options that say nothing without --cascade.
_OF_CASCADE = ("cascade_name", "thresholds", "quality", "sample", "judge", "judge_parameters")


def add_cascade_options(parser: argparse.ArgumentParser) -> None:
    """Options beside --cascade. None of them has a default, so that it shows which were given."""
    add = parser.add_argument_group("a cascade", "with --cascade").add_argument
    add("--cascade-name", metavar="NAME", help=f"clients ask for it as model (default: {CASCADE_NAME})")
    add(
        "--thresholds",
        metavar="N,N",
        help="least score, 0 to 100, at which an answer is delivered, one per model but the last (default: 70)",
    )
    add("--quality", type=float, metavar="N", help="mean quality that thresholds are planned for; needs --sample")
    add("--sample", metavar="FILE", help="recorded answers with the truth, to plan from (.jsonl[.gz])")
    add("--judge", choices=[str(kind) for kind in JudgeKind], help="what scores answers (default: confidence)")
    add(
        "--judge-parameters",
        metavar="JSON",
        help='of external and llm: {"url": ..., "model": ...}; llm without it: the shipped judge, on one more engine',
    )


def judge_model(arguments: argparse.Namespace) -> str:
    """Model of this cluster that judges, by name or folder; empty for none.

    Raises:
        CliError: the parameters are no JSON object.
    """
    if not arguments.cascade or arguments.judge != JudgeKind.LLM:
        return ""
    told = _parameters(arguments.judge_parameters)
    return "" if "url" in told else str(told.get("model") or JUDGE_MODEL)


def cascade_of(arguments: argparse.Namespace, models: Sequence[str]) -> CascadeSpec | None:
    """The cascade that the options mean; None for none.

    Raises:
        CliError: naming the option.
    """
    if not arguments.cascade:
        stray = next((name for name in _OF_CASCADE if getattr(arguments, name) is not None), "")
        if stray:
            raise CliError(f"--{stray.replace('_', '-')}: only together with --cascade")
        return None
    parameters = _parameters(arguments.judge_parameters)
    if judge := judge_model(arguments):
        parameters |= {"model": model_folder(judge).name}
    return CascadeSpec(
        name=arguments.cascade_name or CASCADE_NAME,
        tiers=list(models),
        thresholds=_thresholds(arguments.thresholds),
        quality=arguments.quality,
        sample=str(Path(arguments.sample).absolute()) if arguments.sample else "",
        judge=JudgeKind(arguments.judge or JudgeKind.CONFIDENCE),
        parameters=parameters,
    )


def _thresholds(text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise CliError(f"--thresholds {text}: numbers from 0 to 100, separated by commas") from None


def _parameters(text: str | None) -> dict[str, object]:
    try:
        told = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise CliError(f"--judge-parameters: {error}") from None
    if not isinstance(told, dict):
        raise CliError("--judge-parameters: a JSON object is needed")
    return told
