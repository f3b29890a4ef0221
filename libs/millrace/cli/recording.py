"""Shows, exports and imports recordings of a cluster's load, from which `millrace what-if` answers.

    millrace recording show                       # what the running cluster has recorded
    millrace recording export load.jsonl.gz       # the last hour of it as one file
    millrace recording import trace.jsonl load.jsonl.gz --format mooncake

A cluster records by default (docs/WHAT_IF.md). Formats: mooncake, azure and burstgpt, as these traces are published;
openai, a log of JSON lines with a time and the reply's usage; sharegpt has lengths without times.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from millrace.cli.cluster import folder_of
from millrace.cli.errors import CliError
from millrace.workloads.readers import READERS
from millrace.workloads.recording import RecordedLoad, read_recording, rows_of, write_recording
from millrace.workloads.shape import WorkloadError

#: What is read of a running cluster's recording, s.
LAST_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``show``, ``export`` and ``import``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="what a recording holds")
    export = actions.add_parser("export", help="write a recording to one file")
    export.add_argument("target", type=Path, metavar="TARGET", help="file to write, .jsonl or .jsonl.gz")
    for each in (show, export):
        add_source(each)
    imported = actions.add_parser("import", help="make a recording of a trace or an access log")
    imported.add_argument("source", type=Path, metavar="SOURCE")
    imported.add_argument("target", type=Path, metavar="TARGET", help="file to write, .jsonl or .jsonl.gz")
    imported.add_argument("--format", required=True, choices=sorted(set(READERS) - {"recording"}))


def add_source(parser: argparse.ArgumentParser) -> None:
    """Options that say which recording."""
    parser.add_argument("--file", type=Path, metavar="FILE", help="a recording; default: that of the running cluster")
    parser.add_argument("--last", type=float, default=LAST_S, metavar="SECONDS", help="(default: %(default)g)")
    parser.add_argument("--dir", help="folder of the cluster (default: .millrace, from here upwards)")


def recording_of(arguments: argparse.Namespace, *, requests_max: int = 0, latest: bool = False) -> RecordedLoad:
    """The recording that the options name; of a file all of it, unless ``--last`` says otherwise. Of that, what
    ``read_recording`` is asked for.

    Raises:
        CliError: there is none, or it cannot be read.
    """
    last_s = 0.0 if arguments.file and arguments.last == LAST_S else arguments.last
    try:
        return read_recording(source_of(arguments), last_s=last_s, requests_max=requests_max, latest=latest)
    except WorkloadError as error:
        raise CliError(str(error)) from None


def source_of(arguments: argparse.Namespace) -> Path:
    """The file, or the folder of the cluster's recording.

    Raises:
        CliError: there is none.
    """
    if arguments.file is not None:
        return Path(arguments.file)
    folder = folder_of(arguments.dir)
    if folder is None or not (folder / "recording").is_dir():
        raise CliError("no cluster has recorded anything here; start one, name its --dir, or a recording with --file")
    return folder / "recording"


def run(arguments: argparse.Namespace) -> int:
    """Carries out the action."""
    try:
        if arguments.action == "import":
            rows = rows_of(READERS[arguments.format](arguments.source), origin=arguments.format)
            print(f"{arguments.target}: {write_recording(arguments.target, rows) - 1} requests")
            return 0
        load = recording_of(arguments)
        if arguments.action == "export":
            write_recording(arguments.target, load.rows())
            print(f"{arguments.target}: {len(load.requests)} requests")
        else:
            print("\n".join(shown(load)))
    except WorkloadError as error:
        raise CliError(str(error)) from None
    except OSError as error:
        raise CliError(f"{arguments.target} cannot be written: {error.strerror}") from None
    return 0


def shown(load: RecordedLoad) -> list[str]:
    """A few lines about a recording."""
    rows = [row for _, row in load.requests]
    done = [row for row in rows if row.outcome == "completed"]
    span_s = (rows[-1].at_ns - rows[0].at_ns) / 1e9
    rate = f" ({len(rows) / span_s:.2f}/s)" if span_s else ""
    alike = sum(row.shared * row.block_size for row in rows) / max(1, sum(row.prompt for row in rows))
    models = sorted({row.model for row in rows if row.model})
    lines = [
        f"{len(rows)} requests in {span_s:.0f} s{rate}, {len(done)} completed",
        f"models: {', '.join(models) or 'not told'}; instances: {', '.join(sorted(load.instances)) or 'not told'}",
        f"prompt {_quantiles([row.prompt for row in rows])} tokens, {alike:.0%} of them as in an earlier one; "
        f"output {_quantiles([tokens for row in rows for tokens in row.outputs])}",
    ]
    for name, values in (
        ("TTFT", [row.ttft_ns / 1e6 for row in done if row.ttft_ns >= 0]),
        ("end to end", [row.e2e_ns / 1e6 for row in done if row.e2e_ns >= 0]),
    ):
        if values:
            lines.append(f"{name} {_quantiles(values)} ms")
    return lines


def _quantiles(values: list[int] | list[float]) -> str:
    if len(values) < 2:
        return ", ".join(map(digits, values)) or "none"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return f"p50 {digits(cuts[49])}, p99 {digits(cuts[98])}"


def digits(value: float) -> str:
    """A number with four digits, and all of those before its point."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
