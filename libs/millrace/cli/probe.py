"""Exits with 0 if a URL answers with a 2xx status, else with 1: the health check of containers, which have no curl."""

from __future__ import annotations

import argparse
import urllib.error
import urllib.request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    parser.add_argument("url")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds")


def run(arguments: argparse.Namespace) -> int:
    """Asks once."""
    if not arguments.url.startswith(("http://", "https://")):
        return 2
    try:
        with urllib.request.urlopen(arguments.url, timeout=arguments.timeout):  # scheme checked above
            return 0
    except (urllib.error.URLError, OSError, ValueError):
        return 1
