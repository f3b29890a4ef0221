"""Explains the placement of one request: candidates, predictions, the choice with its reason, and the outcome.

REQUEST is a request id (the `id` of the API's response, or the client's own `x-request-id`), a sequence id or a trace
id. Reads `.millrace/traces/`.

INSTANCE is a running one: explains what its broker does about the requests there, or why it moves none. MODEL is a
served one: explains its plan, and what the autopilot advises.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    parser.add_argument("request", metavar="REQUEST|INSTANCE|MODEL")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation."""
    from millrace.cli.explain_text import told

    for line in _told_by_cluster(arguments) or told(_explained(arguments)):
        print(line)
    return 0


def _explained(arguments: argparse.Namespace) -> Any:
    from millrace.cli.explain_spans import explained_by_spans
    from millrace.cli.trace import trace_folder
    from millrace.cli.trace_reading import request_of, spans_of

    folder = trace_folder(arguments.dir and Path(arguments.dir))
    return explained_by_spans(spans_of(folder, request_of(arguments.request)))


def _told_by_cluster(arguments: argparse.Namespace) -> list[str]:
    """Lines on a model or an instance of that name; none where there is neither, or no cluster runs."""
    import asyncio

    from millrace.cli.errors import CliError
    from millrace.cli.explain_instance import told_by_cluster
    from millrace.cli.trace_reading import is_request

    if is_request(arguments.request):  # who asks for one need not wait for the cluster
        return []
    try:
        return asyncio.run(told_by_cluster(arguments))
    except CliError:
        return []
