"""Gap of a moving request with H200 step times over 25, 100 and 400 Gb/s links, contexts to 128K, in simulation.

Two modelled engines (Llama-3-8B on an H200, KV 131,072 bytes a token) under the services' own actors in virtual time.
One watched request per context goes to and fro between them in each mode, alone and beside other decoding sequences.
The *gap* is the longest interval between two tokens at its client from the asking to the first token after the answer;
*frozen* is from the freeze to the word that the target has it (a recompute begins only then). A network
card, or a GPU's copy engines, copies at no cost to the engines: what `others` shows is one sequence less in their batch
while it stands still, and with recompute its prompt. Step times were fitted to contexts up to 8,192 tokens; beyond,
they are extrapolated. The freeze of stop_and_copy may last for as long as the copy takes here; as configured it gives
up after two seconds.
"""

from __future__ import annotations

import argparse
import statistics
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from millrace.contracts.migration import MigrateSequence, MigrationMode, MigrationOutcome
from millrace.enginemodel.network import TOKEN_BYTES
from millrace.sim.runtime_sim import MILLISECOND, SECOND

from bench.watched_cluster import ENDLESS, ENGINE, LIMIT_S, OTHERS_PROMPT, K, WatchedCluster
from services.ingress.calls.messages import CallAbandoned

#: Room for the copy of 128K at 25 Gb/s: stop_and_copy stands still for six seconds, and with the default of 4 blocks a
#: live copy that takes longer than about 64 tokens do outgrows its reservation and is refused.
LIMITS = {"copy_freeze_ms": 60_000, "growth_blocks": 64}
#: Tokens of the watched request between two migrations.
PAUSE_TOKENS = 12
STEP_TIME = "h200-llama-3-8b"


@dataclass(slots=True)
class Cell:
    """Results of one (bandwidth, others, context, mode). Milliseconds."""

    gaps: list[float] = field(default_factory=list)
    frozen: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


class Stage(WatchedCluster):
    """Two engines, others that decode on both, and one watched request at a time."""

    def __init__(
        self, *, gbps: float, others: int, seed: int, step_time: str = STEP_TIME, token_bytes: int = TOKEN_BYTES
    ) -> None:
        table = {
            "seed": seed,
            "cluster": {"groups": [{"name": "e", "instances": 2, "step_time": step_time, "engine": ENGINE}]},
            "dispatch": {"policy": "round_robin"},
            "prediction": {"kind": "none"},
            "intervals": {"status_ms": 20, "summary_ms": 25, "token_ms": 0, "run_ms": 0},
            "migration": {"on": True, "bandwidth_gbps": gbps, "limits": LIMITS, "token_bytes": token_bytes},
        }
        super().__init__(table)
        self.others = self.begin(2 * others)

    def watch(self, context: int, cells: dict[MigrationMode, Cell], moves: int) -> None:
        """Moves a request of this length to and fro, in each mode in turn."""
        request = self.submit(context, ENDLESS)
        self.until(request, PAUSE_TOKENS)
        for _ in range(moves):
            for mode, cell in cells.items():
                self._move(request, mode, cell)
        process = self.cluster.ingresses[0].process
        assert process is not None
        process.deliver(CallAbandoned(request=request, reason="client_gone"))
        self.cluster.simulation.run_for(SECOND)

    def _move(self, request: str, mode: MigrationMode, cell: Cell) -> None:
        cluster, simulation = self.cluster, self.cluster.simulation
        names = sorted(cluster.engines, key=lambda name: cluster.engines[name].engine.find(f"{request}.0") is None)
        told, began = len(cluster.observer.migrations), len(self.times(request))
        simulation.run_for(simulation.rng.randrange(10 * MILLISECOND))  # at any point of a step
        asked_ns = simulation.now_ns
        ask = MigrateSequence(sequence=f"{request}.0", target=names[1], mode=mode)
        simulation.publish(cluster.subjects.migrate(names[0], "start"), ask, sender="bench")
        while len(cluster.observer.migrations) == told:
            assert simulation.now_ns < asked_ns + LIMIT_S * SECOND, "the migration does not end"
            simulation.run_for(MILLISECOND)
        answered_ns = simulation.now_ns
        self.until(request, len(self.times(request)) + PAUSE_TOKENS)
        finished = cluster.observer.migrations[told]
        cell.outcomes[finished.outcome] += 1
        if finished.outcome == MigrationOutcome.MOVED:
            times = self.times(request)[max(0, began - PAUSE_TOKENS) :]
            end_ns = times[min(bisect_left(times, answered_ns) + 1, len(times) - 1)]
            self._note(cell, times, asked_ns, end_ns)
            cell.frozen.append(finished.frozen_ns / 1e6)
            cell.took.append(finished.duration_ns / 1e6)
            cell.rounds.append(finished.rounds)

    def _note(self, cell: Cell, times: list[int], asked_ns: int, end_ns: int) -> None:
        inside, outside = split(times, asked_ns, end_ns)
        cell.gaps.append(max(inside))
        cell.usual.append(statistics.median(outside))
        for other in self.others:
            theirs = self.times(other)
            near = theirs[max(0, bisect_left(theirs, asked_ns) - PAUSE_TOKENS) :]
            inside, outside = split(near, asked_ns, end_ns)
            cell.inside += inside
            cell.outside += outside


def split(times: list[int], begin_ns: int, end_ns: int) -> tuple[list[float], list[float]]:
    """Intervals that overlap with the window, and those that do not, ms."""
    inside: list[float] = []
    outside: list[float] = []
    for earlier, later in pairwise(times):
        (inside if earlier < end_ns and begin_ns <= later else outside).append((later - earlier) / 1e6)
    return inside, outside


HEAD = (
    f"{'Gb/s':>6} {'others':>6} {'context':>7}  {'mode':14} {'gap ms: p50':>12} {'max':>8} {'usual':>6}"
    f" {'frozen: p50':>13} {'max':>7} {'took p50':>10} {'rounds':>7} {'others: mean':>12} {'longest':>7}  outcomes"
)


def line(gbps: float, others: int, context: int, mode: MigrationMode, cell: Cell) -> str:
    """One row."""
    told = f"{gbps:6.0f} {others:6} {context // K:6}K  {mode:14}"
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(cell.outcomes.items()))
    if not cell.gaps:
        return f"{told}  {outcomes}"
    slow = f"{'-':>12} {'-':>7}"
    if cell.inside:
        slow = f"{100 * (np.mean(cell.inside) / np.mean(cell.outside) - 1):+10.1f} % {max(cell.inside):7.1f}"
    median = statistics.median
    return (
        f"{told} {median(cell.gaps):12.1f} {max(cell.gaps):8.1f} {median(cell.usual):6.1f} {median(cell.frozen):13.2f}"
        f" {max(cell.frozen):7.1f} {median(cell.took):10.0f} {statistics.mean(cell.rounds):7.1f} {slow}  {outcomes}"
    )


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbps", type=float, nargs="+", default=[25, 100, 400])
    parser.add_argument("--others", type=int, nargs="+", default=[0, 16], help="decoding sequences on each engine")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1, 8, 32, 128], help="thousands (1024) of tokens")
    parser.add_argument("--moves", type=int, default=2, help="in each mode, per seed")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    moves = options.moves * options.seeds
    print(f"{STEP_TIME}, {TOKEN_BYTES:,} bytes a token; virtual time")
    print(f"{moves} migrations per row, seeds 0 to {options.seeds - 1}; others begin at")
    print(f"{OTHERS_PROMPT} tokens; `others`: mean interval of theirs during a migration against before and after,")
    print("and their longest one, ms")
    print(HEAD, flush=True)
    good = True
    for gbps in options.gbps:
        for others in options.others:
            cells = {context: {mode: Cell() for mode in MigrationMode} for context in options.contexts}
            for seed in range(options.seeds):
                stage = Stage(gbps=gbps, others=others, seed=seed)
                for context, by_mode in cells.items():
                    stage.watch(context * K, by_mode, options.moves)
            for context, by_mode in cells.items():
                for mode, cell in by_mode.items():
                    print(line(gbps, others, context * K, mode, cell), flush=True)
                    good &= not set(cell.outcomes) - {"moved"}
    return 0 if good else 1
