"""Trains models from recordings of a cluster: ``millrace train tagger``, ``train remaining``, ``train judge``,
``train entry``.

A running tagger trains by itself; ``train tagger`` is for starting from recordings, and for inspecting the figures.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Iterator
from pathlib import Path

from millrace.cli import train_entry, train_judge
from millrace.cli.errors import CliError
from millrace.cli.progress import working
from millrace.lengths.files import read_models, read_outcomes, read_requests, write_model
from millrace.lengths.frames import FileUnreadable
from millrace.lengths.head import HEAD_FILE, HeadUnreadable, RemainingHead, read_head, write_head
from millrace.lengths.samples import LengthSample, samples_of
from millrace.lengths.scoring import Score
from millrace.lengths.states import read_states, states_header
from millrace.lengths.training import TrainingResult, train_candidate

DEFAULT_FOLDER = Path(".millrace") / "lengths"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``train tagger --model NAME (--from FILE ... | --requests FILE ...)``; ``train remaining --from FILE ...``;
    ``train judge --from FILE ...``; ``train entry --from FILE ...``.
    """
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    _add_remaining(kinds.add_parser("remaining", help="the head that reads remaining lengths from hidden states"))
    train_judge.add_arguments(kinds.add_parser("judge", help="how likely an answer is right, from its tokens"))
    train_entry.add_arguments(kinds.add_parser("entry", help="which tiers of a cascade a prompt is for"))
    tagger = kinds.add_parser("tagger", help="the model of output lengths")
    tagger.add_argument("--model", required=True, help="the served model whose outputs these are")
    source = tagger.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--from", dest="outcomes", nargs="+", type=Path, metavar="FILE", help="outcomes that taggers kept (*.outcomes)"
    )
    source.add_argument(
        "--requests",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="recorded requests, one JSON object a line (.jsonl[.gz])",
    )
    tagger.add_argument("--directory", type=Path, default=DEFAULT_FOLDER, help=f"(default {DEFAULT_FOLDER})")
    tagger.add_argument("--output", type=Path, help="write the model to this file instead")
    tagger.add_argument("--force", action="store_true", help="replace a model that is better, too")


def _add_remaining(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="states",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="states that workers kept",
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--model-path", type=Path, metavar="FOLDER", help=f"the model's: for {HEAD_FILE}")
    place.add_argument("--output", type=Path, help="write the head to this file, and compare it with survival alone")
    parser.add_argument("--force", action="store_true", help="replace a head that is better, too")


def run(arguments: argparse.Namespace) -> int:
    """Trains, shows the figures, and puts the model in force where it is better; returns 3 where it is not."""
    runs = {"remaining": _run_remaining, "judge": train_judge.run, "entry": train_entry.run, "tagger": _run_tagger}
    with working(f"training: {arguments.kind}"):
        return runs[arguments.kind](arguments)


def _run_remaining(arguments: argparse.Namespace) -> int:
    from millrace.lengths.remaining_training import train_head  # it needs torch

    path = arguments.output or arguments.model_path / HEAD_FILE
    try:
        header = states_header(arguments.states[0])
        if any(states_header(other) != header for other in arguments.states[1:]):
            raise CliError("the files hold states of different models")
        incumbent = None if arguments.output else _head_in_force(path, header.fingerprint)
        result = train_head(list(read_states(arguments.states)), header=header, incumbent=incumbent)
        print(result.reason)
        for name, found in result.scores.items():
            print(_line(name, found))
        if result.head is None or not (result.accepted or arguments.force):
            return 3
        write_head(path, result.head)
        print(f"written: {path}")
    except (FileUnreadable, OSError) as error:
        raise CliError(str(error)) from None
    return 0


def _head_in_force(path: Path, fingerprint: str) -> RemainingHead | None:
    """The head of these weights; None where there is none, or an unusable one, which answers nothing either."""
    try:
        return read_head(path, fingerprint=fingerprint)
    except (HeadUnreadable, FileNotFoundError):
        return None


def _run_tagger(arguments: argparse.Namespace) -> int:
    try:
        samples = list(_samples(arguments))
        incumbent = (
            b"" if arguments.output else read_models(arguments.directory, shipped=True)[0].get(arguments.model, b"")
        )
        result = train_candidate(samples, model=arguments.model, incumbent=incumbent, trained_ns=_newest(samples))
        print(_report(result, samples))
        if not result.model or not (result.accepted or arguments.force):
            return 3
        print(f"written: {_write(arguments, result.model)}")
    except (FileUnreadable, OSError) as error:
        raise CliError(str(error)) from None
    return 0


def _samples(arguments: argparse.Namespace) -> Iterator[LengthSample]:
    if arguments.outcomes:
        kept = [sample for path in arguments.outcomes for sample in read_outcomes(path)]
        yield from sorted(kept, key=lambda sample: sample.at_ns)
        return
    for path in arguments.requests:
        opener = gzip.open if path.suffix == ".gz" else Path.open
        with opener(path, "rb") as lines:
            yield from samples_of(read_requests(lines, str(path)))


def _newest(samples: list[LengthSample]) -> int:
    return max((sample.at_ns for sample in samples), default=0)


def _write(arguments: argparse.Namespace, payload: bytes) -> Path:
    if arguments.output is None:
        return write_model(arguments.directory, arguments.model, payload)
    arguments.output.write_bytes(payload)
    return Path(arguments.output)


def _report(result: TrainingResult, samples: list[LengthSample]) -> str:
    rows = [("in force", result.incumbent), ("candidate", result.candidate)]
    lines = [f"{len(samples)} outcomes; {result.reason}"]
    lines += [_line(name, score) for name, score in rows if score is not None]
    return "\n".join(lines)


def _line(name: str, score: Score) -> str:
    return (
        f"  {name:<37} mean error {score.error:.1f} tokens, error rate {score.error_rate:.1%}, within 50 tokens "
        f"{score.acc_50:.1%}, within 100 {score.acc_100:.1%}, p90 covers {score.covered_90:.1%}"
    )
