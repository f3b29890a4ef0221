"""Entry point of ``millrace``: finds the verb, imports its module, runs it, turns failures into one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from millrace.cli.errors import CliError, UsageError
from millrace.cli.verbs import VERBS, Verb

_EPILOG = "`millrace VERB --help` explains a verb. Without options a verb means the cluster that runs here."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code: 0 fine, 1 failed (one sentence on standard error), 2 wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = next((verb for verb in VERBS if words[:1] == [verb.name]), None)
    if verb is None:
        _overview().parse_args(words or ["--help"])
        return 2  # argparse has ended the process for every wrong word; this is for an option without a verb
    try:
        return _run(verb, words[1:])
    except CliError as error:
        print(f"millrace {verb.name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has enough. Standard output must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(verb: Verb, words: list[str]) -> int:
    module = importlib.import_module(verb.module)
    parser = argparse.ArgumentParser(
        prog=f"millrace {verb.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # `--engin modelled` would be taken here, but setup/install.py, which looks for --engine, would install vLLM.
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words)))


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
