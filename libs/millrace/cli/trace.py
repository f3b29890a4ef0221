"""Draws the spans of one request: each with its service, offset, bar, duration and attributes.

REQUEST is a request id (the `id` of the API's response), a sequence id or a trace id. Without it the latest requests
are listed. Reads `.millrace/traces/`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path

from millrace.cli.cluster import folder_of
from millrace.cli.errors import CliError
from millrace.cli.field_text import duration, shown_fields
from millrace.cli.trace_reading import attribute, latest_requests, request_of, spans_of
from millrace.cli.trace_tree import draw
from millrace.telemetry.spans import SpanLine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("request", nargs="?", metavar="REQUEST")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="of traces or of a cluster (default: .millrace)")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="how many requests are listed (default 20)")


def run(arguments: argparse.Namespace) -> int:
    """Draws or lists."""
    folder = trace_folder(arguments.dir)
    width = shutil.get_terminal_size((120, 24)).columns
    if arguments.request is None:
        lines = _listing(latest_requests(folder, max(1, arguments.count)))
    else:
        paint = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        lines = draw(spans_of(folder, request_of(arguments.request)), width=width, paint=paint)
    for line in lines:
        print(line)
    return 0


def trace_folder(given: Path | None) -> Path:
    """The given folder of traces or of a cluster, or that of the cluster found from here upwards.

    Raises:
        CliError: there is none.
    """
    if given is not None:
        return given / "traces" if (given / "traces").is_dir() else given
    folder = folder_of(None)
    if folder is None:
        raise CliError("no .millrace folder in this folder or a parent; give --dir DIR")
    return folder / "traces"


#: Attributes of a request in the list; ``delivered`` and ``reason`` are a cascade's.
_LISTED = ("model", "outcome", "delivered", "reason", "prompt_tokens", "output_tokens", "policy", "key")


def _listing(requests: list[SpanLine]) -> list[str]:
    if not requests:
        return ["no request is recorded here yet"]
    lines = []
    for root in requests:
        at = datetime.fromtimestamp(root.start_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]  # noqa: DTZ006
        attributes = {name: attribute(root, name) for name in _LISTED}
        trouble = f" failed: {root.error}" if root.error else ""
        request, took = str(attribute(root, "request")), duration(root.end_ns - root.start_ns)
        lines.append(f"{at}  {request:<36} {took:>8}  {shown_fields(attributes)}{trouble}")
    return lines
