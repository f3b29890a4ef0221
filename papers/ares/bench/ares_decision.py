"""Central ARES: how long one decision over all instances takes, and what it decides.

    python -m bench ares_decision --instances 256 1000

Random loads: 64 requests an instance, lengths and rests log-normal (median 1,500 and 1,000 tokens), 16 points over 30 s
at 18 ms a step; a quarter of the instances are overloaded then. Processor time, medians over repeats of new states.
Aims: 10 ms at 256 instances and 100 ms at 1,000, one move. The figure of the paper is 300 ms at 256.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from papers.ares.rescheduling import DecodeInstance, Parameters, decide

REQUESTS = 64
POINTS = 17
HORIZON_S = 30.0
STEP_NS = 18_000_000
MOVE_NS = 500_000_000
AIMS_MS = {256: 10.0, 1_000: 100.0}


def state(count: int, seed: int) -> tuple[DecodeInstance, ...]:
    """Instances with random requests."""
    rng = np.random.default_rng(seed)
    grown = np.linspace(0.0, HORIZON_S, POINTS) * 1e9 / STEP_NS
    return tuple(_instance(rng, f"i{index}", grown) for index in range(count))


def _instance(rng: np.random.Generator, name: str, grown: np.ndarray) -> DecodeInstance:
    lengths = rng.lognormal(np.log(1_500), 1.0, REQUESTS).round()
    rests = rng.lognormal(np.log(1_000), 1.2, REQUESTS).round() + 1
    tokens = np.where(grown < rests[:, None], lengths[:, None] + grown, 0.0)
    return DecodeInstance(
        name=name,
        tokens=tokens.sum(axis=0),
        requests=tuple(f"{name}.{row}" for row in range(REQUESTS)),
        of_requests=tokens,
        rests=rests,
        capacity_tokens=400_000,
        step_ns=STEP_NS,
        move_ns=MOVE_NS,
    )


def main() -> int:
    """Prints a table; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[256, 1_000])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(f"{'instances':>9} {'moves':>6} {'overloaded':>11} {'median ms':>10} {'worst ms':>9} {'aim ms':>7}")
    for count in arguments.instances:
        for moves in (1, 16):
            _row(count, moves, arguments.repeats)
    return 0


def _row(count: int, moves: int, repeats: int) -> None:
    parameters = Parameters(moves_max=moves)
    took, overloaded = [], []
    for seed in range(repeats):
        instances = state(count, seed)
        loads = np.array([one.tokens[1:].mean() for one in instances])
        overloaded.append(int((loads > (1 + parameters.theta) * loads.mean()).sum()))
        began = time.process_time_ns()
        decide(instances, parameters)
        took.append((time.process_time_ns() - began) / 1e6)
    aim = f"{AIMS_MS[count]:.0f}" if moves == 1 and count in AIMS_MS else ""
    print(f"{count:>9} {moves:>6} {median(overloaded):>11.0f} {median(took):>10.1f} {max(took):>9.1f} {aim:>7}")
