"""Runs whole clusters in virtual time: random load, kills, losses, partitions, then what must hold.

Each seed builds ingresses, workers with modelled engines, coordinators, taggers and clients, harms them, heals them,
and checks that every
request had one outcome, every token was right and in order, and nothing was left behind. The same seed does the same
on any machine.
"""

from __future__ import annotations

import argparse

from millrace.sim import soak


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    soak.add_arguments(parser)
    parser.set_defaults(seeds=20)


def run(arguments: argparse.Namespace) -> int:
    """Runs the seeds."""
    return soak.run(arguments)
