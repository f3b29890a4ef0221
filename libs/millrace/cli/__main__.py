"""Entry point of ``millrace``: finds the verb, imports its module, runs it, turns failures into one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence

from millrace.cli.running import run_verb
from millrace.cli.verbs import VERBS

_EPILOG = "`millrace VERB --help` explains a verb. Without options a verb means the cluster that runs here."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code: 0 fine, 1 failed (one sentence on standard error), 2 wrong usage.

    A verb of another program replaces this process; where ``arguments`` are given, it is a child process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = next((verb for verb in VERBS if words[:1] == [verb.name]), None)
    if verb is None:
        _overview().parse_args(words or ["--help"])
        return 2  # argparse has ended the process for every wrong word; this is for an option without a verb
    if not verb.program:
        return run_verb(verb.name, importlib.import_module(verb.module), words[1:])
    command = [sys.executable, "-m", verb.program, *words]
    if arguments is None:
        os.execv(command[0], command)
    return subprocess.run(command, check=False).returncode


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millrace",
        description="Serves language models on many vLLM engines; this command starts a cluster and looks into it.",
        epilog=_EPILOG,
    )
    verbs = parser.add_subparsers(metavar="VERB", title="verbs", required=True)
    for verb in VERBS:
        verbs.add_parser(verb.name, help=verb.summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
