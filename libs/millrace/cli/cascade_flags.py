"""Options of `millrace up` about a cascade, read from the parsed command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from millrace.cli.errors import CliError
from millrace.cluster import CascadeSpec


def cascade_of(arguments: argparse.Namespace, models: Sequence[str]) -> CascadeSpec | None:
    """The cascade that the options mean; None for none.

    Raises:
        CliError: naming the option.
    """
    if not arguments.cascade:
        if arguments.thresholds is not None:
            raise CliError("--thresholds: only together with --cascade")
        return None
    return CascadeSpec(tiers=list(models), thresholds=_thresholds(arguments.thresholds))


def _thresholds(text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise CliError(f"--thresholds {text}: numbers from 0 to 100, separated by commas") from None
