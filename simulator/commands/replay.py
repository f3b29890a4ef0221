"""Feeds a recorded inbox to its actor, built again from the recording, and shows every difference in effects.

A service makes a recording when its configuration sets `record`. No difference means that the present code has the
same effects for every message as the recorded run. The exit code is 1 on any difference.
"""

from __future__ import annotations

import argparse
from pathlib import Path

#: Differences that are printed; their number is printed in any case.
SHOWN_MAX = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--actor", metavar="NAME", help="refuse the file unless it is this actor's")
    parser.add_argument("--all", action="store_true", help=f"print all differences, not the first {SHOWN_MAX}")


def run(arguments: argparse.Namespace) -> int:
    """Replays; prints differences and a last line that sums up."""
    from millrace.actor.recording import RecordingReader, replay
    from millrace.cli.differences import difference_lines
    from millrace.cli.errors import CliError

    from simulator.recorded_actor import build_actor

    try:
        reader = RecordingReader(arguments.file)
    except FileNotFoundError:
        raise CliError(f"there is no file {arguments.file}") from None
    except ValueError as error:
        raise CliError(str(error)) from None
    if arguments.actor not in (None, reader.header.actor):
        raise CliError(f"{arguments.file} is a recording of {reader.header.actor or 'the bus'}, not {arguments.actor}")
    actor = build_actor(reader.header)
    frames = sum(1 for _ in reader)
    count = 0
    for count, difference in enumerate(replay(reader, actor), start=1):
        if arguments.all or count <= SHOWN_MAX:
            print("\n".join(difference_lines(difference)))
    print(
        f"{reader.header.actor} ({reader.header.kind}): {frames} recorded steps replayed, "
        f"{count or 'no'} difference{'s' * (count != 1)} in effects"
    )
    return 1 if count else 0
