"""Errors that end a verb with one sentence: exit code 1, or 2 where its options are at fault."""

from __future__ import annotations


class CliError(Exception):
    """Something outside the command is wrong; the text says what, and what to do about it."""


class UsageError(CliError):
    """The options contradict each other or would do nothing; the text names them, and what to say instead."""
