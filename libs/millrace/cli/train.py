"""Fits what ships beside a model's weights to recordings, and writes it where it is better.

    millrace train judge     --from FILE ... --model-path FOLDER             # how likely an answer is right
    millrace train entry     --from FILE ... --model-path FOLDER FOLDER ...  # which tiers of a cascade a prompt is for

The model of output lengths is not among them: a running tagger trains it by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from millrace.cascade.entry_files import ENTRY_FILE, fingerprints, write_entry
from millrace.cascade.entry_training import SAVING_MIN, train_entry
from millrace.cli.errors import CliError
from millrace.cli.progress import working
from millrace.enginemodel.coefficients import load_step_time
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.files import (
    CONFIDENCE_FILE,
    JudgeUnreadable,
    RecordingUnreadable,
    read_answers,
    read_judge,
    read_recording,
    write_judge,
)
from millrace.judging.training import train_judge
from millrace.kvcopy.weights import weights_fingerprint
from millrace.supervision.service_fields import STEP_TIMES

#: Sequences of the batch for which a decoded token is priced.
BATCH = 8
#: Exit code where what was fitted is not better.
NOT_BETTER = 3


class _Trained(NamedTuple):
    """A fit with its figures.

    Attributes:
        said: Its figures on what it was not fitted to.
        write: Writes it; None where there was too little to learn from.
    """

    said: list[str]
    accepted: bool
    write: Callable[[Path], None] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``(judge | entry) --from FILE ... --model-path FOLDER ... [--output FILE] [--force]``."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    for kind, (source, says, _run, _file) in _KINDS.items():
        one = kinds.add_parser(kind, help=says)
        add = one.add_argument
        add("--from", dest="files", nargs="+", type=Path, required=True, metavar="FILE", help=source)
        several, whose = ("+", "of the tiers, smallest first") if kind == "entry" else (1, "the model's folder")
        add("--model-path", dest="folders", nargs=several, type=Path, required=True, metavar="FOLDER", help=whose)
        add("--output", type=Path, help="write it to this file, and compare it with none in force")
        add("--force", action="store_true", help="write it even if it is no better")
        if kind == "entry":
            costs = "of a decoded token of each model, any unit (default: by the step times that ship with them)"
            add("--costs", nargs="+", type=float, metavar="N", help=costs)
            share = "share of the last model's quality to keep (default 0.98)"
            add("--quality", type=float, default=0.98, metavar="N", help=share)


def run(arguments: argparse.Namespace) -> int:
    """Fits, shows the figures, and writes the file where it is better; returns 3 where it is not."""
    _source, _says, fit, file = _KINDS[arguments.kind]
    path = arguments.output or arguments.folders[-1] / file
    try:
        with working(f"training: {arguments.kind}"):
            trained = fit(arguments, None if arguments.output else path)
        print("\n".join(trained.said))
        if trained.write is None or not (trained.accepted or arguments.force):
            return NOT_BETTER
        trained.write(path)
    except (RecordingUnreadable, ValueError, OSError) as error:
        raise CliError(str(error)) from None
    print(f"written: {path}")
    return 0


def _judge(arguments: argparse.Namespace, present: Path | None) -> _Trained:
    folder = arguments.folders[0].resolve()
    fingerprint = weights_fingerprint(folder)
    if not fingerprint:
        raise CliError(f"{folder} holds no weights")
    answers = read_answers(arguments.files, folder.name)
    if not answers:
        raise CliError(f"the recording has no answers of {folder.name}, as the model's folder is called")
    result = train_judge(folder.name, answers, fingerprint=fingerprint, incumbent=_in_force(present, folder))
    figures = [
        f"  {name:<24} area {found.area:.3f}, calibration error {found.error:.3f}, Brier {found.brier:.4f}"
        for name, found in result.figures.items()
    ]
    judge = result.judge
    said = [f"{len(answers)} answers; {result.reason}", *figures]
    return _Trained(said, result.accepted, None if judge is None else lambda path: write_judge(path, judge))


def _in_force(present: Path | None, folder: Path) -> ConfidenceModel | None:
    """The judge of these weights; None for no file, or an unusable one, which answers nothing either."""
    try:
        return read_judge(present, model_folder=folder) if present else None
    except (JudgeUnreadable, FileNotFoundError):
        return None


def _entry(arguments: argparse.Namespace, _present: Path | None) -> _Trained:
    folders = [folder.resolve() for folder in arguments.folders]
    costs = arguments.costs or [_token_cost(folder) for folder in folders]
    if len(folders) < 2 or len(costs) != len(folders):
        raise CliError(f"{len(folders)} models and {len(costs)} costs: a cascade has two models, and a cost of each")
    rows = [row for file in arguments.files for row in read_recording(file)]
    result = train_entry(rows, [folder.name for folder in folders], costs, target=arguments.quality)
    verb = "saves enough" if result.accepted else f"saves too little, needs {SAVING_MIN:g}"
    said = [
        f"choice by prompt {verb}: a plain cascade costs {result.saving:.2f} times as much at the same quality, the "
        f"last model alone {result.alone:.2f} times",
        f"  quality {result.quality:.1f}, plain cascade {result.plain_quality:.1f}, "
        f"last model {result.last_quality:.1f}; thresholds of {result.threshold:g} go with it",
    ]
    file = msgspec.structs.replace(result.file, fingerprints=fingerprints(folders))
    return _Trained(said, result.accepted, lambda path: write_entry(path, file))


def _token_cost(folder: Path) -> float:
    name = STEP_TIMES.get(folder.name)
    if name is None:
        raise CliError(f"{folder}: no step times ship with it; give --costs")
    model = load_step_time(name)
    return (model.fixed / BATCH + model.per_decode) / 1e6


#: Help of --from, help of the verb, what fits, and the file beside the weights, by what is trained.
_KINDS = {
    "judge": (
        "recorded answers with log-probabilities and the truth, one JSON object a line (.jsonl[.gz])",
        "how likely an answer is right, from its tokens",
        _judge,
        CONFIDENCE_FILE,
    ),
    "entry": ("the same of all models", "which tiers of a cascade a prompt is for", _entry, ENTRY_FILE),
}
