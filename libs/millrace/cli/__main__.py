"""Entry point of ``millrace``: finds the verb, imports its module, runs it, turns failures into one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version

from millrace.cli.arguments import did_you_mean
from millrace.cli.running import run_verb, without_websockets
from millrace.cli.verbs import VERBS

_EPILOG = "`millrace VERB --help` explains a verb. By default a verb acts on the cluster of this folder."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code: 0 fine, 1 failed (one sentence on standard error), 2 wrong usage.

    A verb of another program replaces this process; where ``arguments`` are given, it is a child process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = next((verb for verb in VERBS if words[:1] == [verb.name]), None)
    if verb is None:
        return _without_verb(words)
    if not verb.program:
        try:
            with without_websockets():
                module = importlib.import_module(verb.module)
        except KeyboardInterrupt:  # Ctrl-C while modules load; later ones are run_verb's
            return 130
        return run_verb(verb.name, module, words[1:])
    command = [sys.executable, "-m", verb.program, *words]
    if arguments is None:
        os.execv(command[0], command)
    return subprocess.run(command, check=False).returncode


def _without_verb(words: list[str]) -> int:
    """Print the overview or the version; one sentence for a verb that there is not."""
    if words[:1] == ["--version"]:
        print(f"millrace {version('millrace')}")
        return 0
    if words and words[0] not in ("-h", "--help"):
        near = did_you_mean(words[0], [verb.name for verb in VERBS])
        print(f"millrace: no verb {words[0]!r}{near}; see `millrace --help`", file=sys.stderr)
        return 2
    print(_overview().format_help())
    return 0


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millrace",
        description="Serves language models on many vLLM engines; this command starts and inspects clusters.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    verbs = parser.add_subparsers(metavar="VERB", title="verbs")
    for verb in VERBS:
        verbs.add_parser(verb.name, help=verb.summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
