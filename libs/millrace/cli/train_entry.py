"""``millrace train entry``: fits the choice of a cascade's tiers by the prompt to recorded answers."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from millrace.cascade.entry_files import ENTRY_FILE, fingerprints, write_entry
from millrace.cascade.entry_training import SAVING_MIN, EntryResult, train_entry
from millrace.cli.errors import CliError
from millrace.enginemodel.coefficients import load_step_time
from millrace.judging.files import RecordingUnreadable, read_recording
from millrace.supervision.service_fields import STEP_TIMES

#: Sequences of the batch for which a decoded token is priced.
BATCH = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--from FILE ... --model-paths FOLDER FOLDER ... [--costs N ...] [--quality N] [--output FILE]``."""
    parser.add_argument(
        "--from",
        dest="answers",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="recorded answers of all models with log-probabilities and the truth (.jsonl[.gz])",
    )
    parser.add_argument(
        "--model-paths", nargs="+", type=Path, required=True, metavar="FOLDER", help="of the tiers, smallest first"
    )
    parser.add_argument(
        "--costs",
        nargs="+",
        type=float,
        metavar="N",
        help="of a decoded token of each model, any unit (default: by the step times that ship with them)",
    )
    parser.add_argument(
        "--quality",
        type=float,
        default=0.98,
        metavar="N",
        help="share of the last model's quality to keep (default 0.98)",
    )
    parser.add_argument("--output", type=Path, help="write it to this file")
    parser.add_argument("--force", action="store_true", help="write it even if it saves too little")


def run(arguments: argparse.Namespace) -> int:
    """Fits, shows the figures, and writes the file where it saves enough; returns 3 where it does not."""
    folders = [folder.resolve() for folder in arguments.model_paths]
    path = arguments.output or folders[-1] / ENTRY_FILE
    costs = arguments.costs or [_token_cost(folder) for folder in folders]
    if len(folders) < 2 or len(costs) != len(folders):
        raise CliError(f"{len(folders)} models and {len(costs)} costs: a cascade has two models, and a cost of each")
    try:
        rows = [row for file in arguments.answers for row in read_recording(file)]
        result = train_entry(rows, [folder.name for folder in folders], costs, target=arguments.quality)
        print(report(result))
        if not (result.accepted or arguments.force):
            return 3
        write_entry(path, msgspec.structs.replace(result.file, fingerprints=fingerprints(folders)))
    except (RecordingUnreadable, ValueError, OSError) as error:
        raise CliError(str(error)) from None
    print(f"written: {path}; thresholds of {result.threshold:g} go with it")
    return 0


def report(result: EntryResult) -> str:
    """The figures of held-out prompts."""
    verb = "saves enough" if result.accepted else f"saves too little, needs {SAVING_MIN:g}"
    return (
        f"choice by prompt {verb}: a plain cascade costs {result.saving:.2f} times as much at the same quality, the "
        f"last model alone {result.alone:.2f} times\n"
        f"  quality {result.quality:.1f}, plain cascade {result.plain_quality:.1f}, "
        f"last model {result.last_quality:.1f}"
    )


def _token_cost(folder: Path) -> float:
    name = STEP_TIMES.get(folder.name)
    if name is None:
        raise CliError(f"{folder}: no step times ship with it; give --costs")
    model = load_step_time(name)
    return (model.fixed / BATCH + model.per_decode) / 1e6
