"""Cost of a load curve, and of what a sequence that leaves or joins does to the others, by size of the instance.

Processor time of one call, us, on an instance that decodes and has a queue: the first one after a snapshot, and
further ones, as a broker asks about several sequences of one snapshot.
"""

from __future__ import annotations

import argparse
import gc
import random
from functools import partial

from millrace.enginemodel.coefficients import load_coefficients
from millrace.enginemodel.forecast import NATIVE, Candidate, Forecaster

from bench.forecast import AT_NS, SIZES, length, limits, percentiles, state, timed_us

HORIZON_NS = 10_000_000_000
POINTS = 16


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench forecast_moves", description=__doc__)
    parser.add_argument("--states", type=int, default=200, help="per size")
    parser.add_argument("--step-time", default="a100-llama-3-8b")
    parser.add_argument("--pressure", action="store_true", help="few blocks: preemptions")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"seed {options.seed}, step time {options.step_time}, compiled module {'there' if NATIVE else 'MISSING'}\n")
    print(f"{'':>15}  {'curve':^17}  {'leave':^17}  {'join':^17}  {'leave, first':^17}")
    head = f"{'p50':>8} {'p99':>8}"
    print(f"{'running+waiting':>15}" + f"  {head}" * 4)
    for running, waiting in SIZES:
        times = measured(options, running, waiting)
        print(f"{running:>8}+{waiting:<6}" + "".join(f"  {percentiles(each)}" for each in times), flush=True)
    return 0


def measured(options: argparse.Namespace, running: int, waiting: int) -> list[list[float]]:
    """Times of a curve, of further leaves and joins, and of the first leave after a snapshot, us."""
    rng = random.Random(options.seed)
    parameters = limits(running, pressure=options.pressure)
    forecaster = Forecaster(load_coefficients(options.step_time).cost(parameters), parameters)
    curves, leaves, joins, firsts = [], [], [], []
    gc.disable()
    for _ in range(options.states):
        snapshot = state(rng, running, waiting, parameters)
        forecaster.load(snapshot)
        forecaster.advance(AT_NS + rng.randrange(50_000_000))
        asked = asked_of(rng)
        firsts.append(timed_us(partial(forecaster.leave, snapshot.running[0].sequence)))
        leaves.append(timed_us(partial(forecaster.leave, snapshot.running[-1].sequence)))
        joins.append(timed_us(partial(forecaster.join, asked)))
        curves.append(timed_us(partial(forecaster.curve, HORIZON_NS, POINTS)))
    gc.enable()
    return [curves, leaves, joins, firsts]


def asked_of(rng: random.Random) -> Candidate:
    """One that decodes elsewhere."""
    expected = length(rng, 200, 0.8) + 1
    return Candidate(
        prompt_tokens=length(rng, 220, 1.0), output_tokens=rng.randrange(expected), expected_output_tokens=expected
    )
