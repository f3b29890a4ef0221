"""Prints messages of a subject as they pass, one line each: time, subject, sender → type, request, main fields.

SUBJECT is relative to the cluster's prefix: `millrace tap 'decision.>'` taps mr.<cluster>.decision.>; NATS wildcards
are * (one token) and > (the rest). A subject that begins with mr. or $ is used unchanged. Replies go to the requester's
private inbox and are not shown. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    from millrace.cli.cluster import add_connection_options

    parser.add_argument("subject", nargs="?", default=">", metavar="SUBJECT", help="default: > (everything)")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="end after N messages")
    parser.add_argument("--headers-only", action="store_true", help="leave the fields out")
    parser.add_argument("--json", action="store_true", help="one JSON object per line, complete")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep the messages in FILE as well")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print a recording instead of the bus")
    add_connection_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Taps until --count or Ctrl-C."""
    import asyncio

    from millrace.cli.tapping import read_recording, tap

    if arguments.read:
        return read_recording(arguments)
    return asyncio.run(tap(arguments))
