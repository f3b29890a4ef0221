"""Explains the placement of one request: candidates, predictions, the choice with its reason, and the outcome.

REQUEST is a request id (the `id` of the API's response, or the client's own `x-request-id`), a sequence id or a trace
id. Reads `.millrace/traces/`.

INSTANCE is a running one: explains what its broker does about the requests there, or why it moves none.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.contracts.broker import LoadReported

#: Ids that ingress gives; whoever asks for one need not wait for loads.
_REQUEST_ID = re.compile(r"(chatcmpl-|cmpl-)?[0-9a-f]{16,}(\.\d+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    parser.add_argument("request", metavar="REQUEST|INSTANCE")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation."""
    from millrace.cli.explain_instance import told_of
    from millrace.cli.explain_text import told

    load = _load(arguments)
    for line in told_of(load) if load is not None else told(_explained(arguments)):
        print(line)
    return 0


def _explained(arguments: argparse.Namespace) -> Any:
    from millrace.cli.explain_spans import explained_by_spans
    from millrace.cli.trace import trace_folder
    from millrace.cli.trace_reading import request_of, spans_of

    folder = trace_folder(arguments.dir and Path(arguments.dir))
    return explained_by_spans(spans_of(folder, request_of(arguments.request)))


def _load(arguments: argparse.Namespace) -> LoadReported | None:
    """The load of an instance of that name; None where it is no instance, or no cluster runs."""
    import asyncio

    from millrace.cli.errors import CliError
    from millrace.cli.explain_instance import load_of

    if _REQUEST_ID.fullmatch(arguments.request):
        return None
    try:
        return asyncio.run(load_of(arguments))
    except CliError:
        return None
