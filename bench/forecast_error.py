"""Sources of error in live forecasts, from recorded runs: pace, later arrivals, messages, the forecast.

``python -m bench live_policies --keep FOLDER`` records; this reads (``--recordings FOLDER``) the runs of stated
lengths, asks a predictor of this code about each placement again, and tells its forecasts more and more of what came.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.live.blame import Told, told_again
from bench.live.recording import read_all
from bench.live.statistics import errors
from bench.live.tables import by_policy

#: What is said of each row.
ROWS = {
    "live": "as told live",
    "again": "as this code tells, every message there at once",
    "alone": "the forecast of its engine alone, nothing learnt from outcomes",
    "later": "the same, who comes later known",
    "pace": "the same, the pace of the steps known",
    "both": "the same, both known",
}


def main() -> int:
    """Reads and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench forecast_error", description=__doc__)
    parser.add_argument("--recordings", type=Path, required=True)
    options = parser.parse_args()
    try:
        recordings = [each for each in read_all(options.recordings) if each.load.kind == "stated"]
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for policy, runs in by_policy(recordings).items():
        seeds = ", ".join(str(each.load.seed) for each in runs)
        print(f"placed by {policy}, {len(runs)} runs, seeds {seeds}")
        columns = f"{'TTFT':>8}{'sums':>7}{'e2e':>8}{'sums':>7}{'n':>6}"
        print(f"  {'mean |error|; sum of predictions over sum of measurements':<66}{columns}")
        told = told_again(runs)
        print("\n".join(_row(name, words, told) for name, words in ROWS.items()))
    return 0


def _row(name: str, words: str, told: Sequence[Told]) -> str:
    known = [(each.measured, getattr(each, name)) for each in told if getattr(each, name) is not None]
    cells = ""
    for figure in (0, 1):
        found = errors((predicted[figure], measured[figure]) for measured, predicted in known)
        cells += f"{found.mean:>8.1%}{found.sums:>7.3f}"
    return f"  {words:<66}{cells}{len(known):>6}"
