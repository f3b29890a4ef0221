"""What ends a verb with one sentence and exit code 1."""

from __future__ import annotations


class CliError(Exception):
    """Something outside the command is wrong; the text says what, and what to do about it."""
