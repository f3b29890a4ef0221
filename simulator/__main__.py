"""Runs the simulator's verbs: ``python -m simulator sim|what-if ...``. ``millrace VERB`` hands over to it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from millrace.cli.running import run_verb

VERBS = ("sim", "what-if")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code: 0 fine, 1 failed (one sentence on standard error), 2 wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in VERBS:
        print(f"usage: python -m simulator {{{','.join(VERBS)}}} ...", file=sys.stderr)
        return 2
    return run_verb(words[0], _module(words[0]), words[1:])


def _module(verb: str) -> ModuleType:
    """Imports only what the verb needs."""
    if verb == "sim":
        from simulator.commands import sim

        return sim
    from simulator.commands import what_if

    return what_if


if __name__ == "__main__":
    sys.exit(main())
