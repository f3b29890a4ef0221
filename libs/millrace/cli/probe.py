"""Exits with 0 if a URL answers with a 2xx status, else with 1: the health check of containers, which have no curl."""

from __future__ import annotations

import argparse
import urllib.error
import urllib.request

from millrace.cli.errors import CliError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    parser.add_argument("url")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds")


def run(arguments: argparse.Namespace) -> int:
    """Asks once."""
    if not arguments.url.startswith(("http://", "https://")):
        raise UsageError(f"{arguments.url}: an http:// or https:// URL is needed")
    try:
        with urllib.request.urlopen(arguments.url, timeout=arguments.timeout):  # scheme checked above
            return 0
    except urllib.error.HTTPError as error:
        raise CliError(f"{arguments.url} answers {error.code} {error.reason}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CliError(f"{arguments.url} does not answer: {getattr(error, 'reason', error)}") from None
