"""The parser of a verb's options: wrong usage is one sentence, with the nearest option that there is."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn


class VerbParser(argparse.ArgumentParser):
    """argparse's parser without the list of all options before an error, which pushes it off the screen."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one sentence."""
        print(f"{self.prog}: {message}{self._suggestion(message)}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        value = super()._get_value(action, arg_string)
        if isinstance(value, int | float) and not 0 <= value < math.inf:  # no verb has use for such a number
            raise argparse.ArgumentError(action, f"{arg_string} is not 0 or more")
        return value

    def _suggestion(self, message: str) -> str:
        before, unknown, words = message.partition("unrecognized arguments: ")
        if before or not unknown or not words.startswith("--"):
            return ""
        return did_you_mean(words.split()[0].partition("=")[0], self._option_string_actions)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean x?)`` for the nearest known word; empty where none is near."""
    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
