"""Runs one verb: its options, and failures as one sentence."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
from collections.abc import Coroutine, Iterator, Sequence
from types import ModuleType
from typing import Any

from millrace.cli.arguments import VerbParser
from millrace.cli.errors import CliError, UsageError


class _Help(argparse.HelpFormatter):
    """Fills paragraphs to the terminal's width, and leaves indented ones, which are commands, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = textwrap.TextWrapper(width, indent, indent, break_on_hyphens=False).fill
        parts = text.replace("``", "`").strip().split("\n\n")
        return "\n\n".join(part if part[0] == " " else fill(part) for part in parts)


@contextlib.contextmanager
def without_websockets() -> Iterator[None]:
    """Hides aiohttp, which vLLM brings, from nats-py: it takes for websockets a third of a verb's start."""
    hidden = {"aiohttp": None} if "aiohttp" not in sys.modules else {}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def run_verb(name: str, module: ModuleType, words: Sequence[str]) -> int:
    """Runs ``millrace NAME WORDS``; returns the exit code: 0 fine, 1 failed, 2 wrong usage.

    Args:
        module: Has ``add_arguments(parser)`` and ``run(arguments)``, plain or async; its docstring is the help.
    """
    parser = VerbParser(
        prog=f"millrace {name}",
        description=module.__doc__,
        formatter_class=_Help,
        # `--engin modelled` would be taken here, but setup/install.py, which looks for --engine, would install vLLM.
        allow_abbrev=False,
    )
    try:
        module.add_arguments(parser)
        code: int | Coroutine[Any, Any, int] = module.run(parser.parse_args(words))
        if not isinstance(code, int):
            import asyncio  # Slow to import, and most verbs are plain functions.

            code = asyncio.run(code)
        return code
    except CliError as error:
        print(f"millrace {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has enough. Standard output must not be flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
