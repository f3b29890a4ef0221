"""Tries on this machine what Millrace does with real engines: serving, moving by two ways of copying, a killed engine.

It starts a cluster of two engines in a folder of its own (on the first GPU where there is one), streams greedy requests
through it, moves one there and back while it runs, kills the engine of another, and stops the cluster. Minutes. A table
shows each step; the report, with what `millrace doctor` finds, goes to a file that a bug report can carry. The exit
code is 1 if a step failed.

No GPU has run Millrace yet: on a node with one, please open an issue with that file, whether it passed or not.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import msgspec

from millrace.cli.machine_probes import look
from millrace.cli.machine_report import outlook
from millrace.cli.selftesting import Outcome, SelfTest

#: Of the first column.
WIDTH = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--model", default="mini", help="as of `millrace up` (default: millrace-mini, which ships)")
    parser.add_argument("--engine", choices=("vllm", "modelled"), default="vllm", help="modelled tries the rest alone")
    parser.add_argument("--tokens", type=int, default=1500, metavar="N", help="length of each stream (default: 1500)")
    parser.add_argument("--report", default="selftest.json", metavar="FILE", help="default: %(default)s")


def run(arguments: argparse.Namespace) -> int:
    """Runs the steps, prints each when it is done."""
    facts = look(Path.cwd(), ())
    outcomes: list[Outcome] = []
    # Whoever ends it early leaves no cluster behind.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="millrace-selftest-") as folder:
        test = SelfTest(Path(folder), facts, outlook(facts), arguments)
        for outcome in test.outcomes():
            print(f"{outcome.step:<{WIDTH}} {outcome.result:<8} {outcome.seconds:6.1f} s  {outcome.detail}", flush=True)
            outcomes.append(outcome)
    signal.signal(signal.SIGTERM, before)
    report = {"millrace": version("millrace"), "machine": facts, "steps": outcomes}
    Path(arguments.report).write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    print(f"report: {arguments.report}")
    return int(any(outcome.result == "failed" for outcome in outcomes))
