"""Runs many seeds: ``python -m simulator.soak --seeds 500``."""

from __future__ import annotations

import argparse
import sys

from simulator.soak import seeds


def main() -> int:
    """Runs the seeds that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m simulator.soak", description=seeds.__doc__)
    seeds.add_arguments(parser)
    return seeds.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
