"""``millrace train judge``: fits the confidence judge of one model to recorded answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from millrace.cli.errors import CliError
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.files import (
    CONFIDENCE_FILE,
    JudgeUnreadable,
    RecordingUnreadable,
    read_answers,
    read_judge,
    write_judge,
)
from millrace.judging.training import train_judge
from millrace.kvcopy.weights import weights_fingerprint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--from FILE ... (--model-path FOLDER | --output FILE) [--model NAME]``."""
    parser.add_argument(
        "--from",
        dest="answers",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="recorded answers with log-probabilities and the truth, one JSON object a line (.jsonl[.gz])",
    )
    parser.add_argument("--model", help="its name in the recording (default: the name of its folder)")
    parser.add_argument("--model-path", type=Path, required=True, metavar="FOLDER", help="the model's folder")
    parser.add_argument("--output", type=Path, help="write the judge to this file, and compare it with no judge")
    parser.add_argument("--force", action="store_true", help="replace a judge that is better, too")


def run(arguments: argparse.Namespace) -> int:
    """Fits, shows the figures, and writes the judge where it is better; returns 3 where it is not."""
    model = arguments.model or arguments.model_path.resolve().name
    path = arguments.output or arguments.model_path / CONFIDENCE_FILE
    try:
        fingerprint = weights_fingerprint(arguments.model_path)
        if not fingerprint:
            raise CliError(f"{arguments.model_path} holds no weights")
        answers = read_answers(arguments.answers, model)
        if not answers:
            raise CliError(f"the recording has no answers of {model}; --model names another one")
        incumbent = None if arguments.output else _in_force(path, arguments.model_path)
        result = train_judge(model, answers, fingerprint=fingerprint, incumbent=incumbent)
        print(f"{len(answers)} answers; {result.reason}")
        for name, found in result.figures.items():
            print(f"  {name:<24} area {found.area:.3f}, calibration error {found.error:.3f}, Brier {found.brier:.4f}")
        if result.judge is None or not (result.accepted or arguments.force):
            return 3
        write_judge(path, result.judge)
    except (RecordingUnreadable, OSError) as error:
        raise CliError(str(error)) from None
    print(f"written: {path} ({result.judge.feature}, area {result.judge.area:.3f}, error {result.judge.error:.3f})")
    return 0


def _in_force(path: Path, model_folder: Path) -> ConfidenceModel | None:
    """The judge of these weights; None where there is none, or an unusable one, which judges nothing either."""
    try:
        return read_judge(path, model_folder=model_folder)
    except (JudgeUnreadable, FileNotFoundError):
        return None
