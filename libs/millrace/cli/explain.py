"""Explains the placement of one request: candidates, predictions, the choice with its reason, and the outcome.

REQUEST is a request id (the `id` of the API's response, or the client's own `x-request-id`), a sequence id or a trace
id. Reads `.millrace/traces/`, or with --read a recording of `millrace tap --record FILE`, which has the decisions of
requests that were not traced.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("request", metavar="REQUEST")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="of traces or of a cluster (default: .millrace)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="look in a recording of `millrace tap` instead")


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation."""
    from millrace.cli.explain_recording import explained_by_recording
    from millrace.cli.explain_spans import explained_by_spans
    from millrace.cli.explain_text import told
    from millrace.cli.trace import trace_folder
    from millrace.cli.trace_reading import request_of, spans_of

    request = request_of(arguments.request)
    if arguments.read is not None:
        explained = explained_by_recording(arguments.read, request)
    else:
        explained = explained_by_spans(spans_of(trace_folder(arguments.dir), request))
    for line in told(explained):
        print(line)
    return 0
