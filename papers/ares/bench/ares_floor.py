"""Preemptions that no move could have avoided: those at which the other instances had no room either.

    python -m bench ares_floor

The testbed of `ares_testbed --scale 0.25` at a rate at which memory is full for long. Engines are sampled ten times a
second. A preemption counts as one without room where, just before it, the other instances that decode together had
fewer idle blocks than one sequence of the preempting instance held on average; and nowhere, where with the prefill
instance's idle blocks there were too few still. Movers that knew everything could have avoided the others at most.
Beside it: the share of the decoders' blocks that was idle then.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec
from millrace.enginemodel.coefficients import load_step_time

from bench.scenarios.scenarios import data_folder, scenario
from bench.scenarios.tables import figure, table
from papers.ares.bench.ares_testbed import BLOCKS, WARM_UP
from papers.ares.bench.variants import VARIANTS
from simulator.scenarios.observer import EngineSample
from simulator.scenarios.running import run_scenario

LABELS = ("none", "delay, survival", "delay, takes no risk")
SCALE = 0.25
SAMPLE_MS = 100
#: Names of instances that only prefill begin with it.
PREFILL = "prefill"


class Preempted(msgspec.Struct, frozen=True):
    """Preemptions of one instance between two samples.

    Attributes:
        count: Of them.
        needed: Blocks of one sequence there, the mean.
        decoders: Idle blocks of the other decoding instances just before.
        elsewhere: Of all other instances.
        idle: Share of the decoding instances' blocks that was idle just before.
    """

    count: int
    needed: float
    decoders: int
    elsewhere: int
    idle: float


def main() -> int:
    """Runs the variants with every seed and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="per run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--rate", type=float, default=0.56, help="requests/s of full length (default %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=LABELS, metavar="NAME")
    arguments = parser.parse_args()
    lines = []
    for label in arguments.variants:
        runs = [_preempted(label, seed, arguments) for seed in range(arguments.seeds)]
        lines.append([label, *_cells(runs)])
    print(f"{arguments.requests} requests a run, seeds 0 to {arguments.seeds - 1}, ± a 95 % t-interval over them")
    print(table(["", "preempted", "no room at decoders", "nowhere", "idle at decoders %"], lines))
    return 0


def _preempted(label: str, seed: int, arguments: argparse.Namespace) -> list[Preempted]:
    settings = [
        f"seed={seed}",
        f"workload.count={arguments.requests}",
        f"workload.warm_up={arguments.requests // WARM_UP}",
        f"workload.models={{modelled={{share=1.0, output_scale={SCALE}}}}}",
        f"workload.arrivals.rate_per_s={arguments.rate / SCALE}",
        f"intervals.sample_ms={SAMPLE_MS}",
        *(f"cluster.groups.{group}.engine.blocks_total={round(BLOCKS * SCALE)}" for group in (0, 1)),
        *VARIANTS[label],
    ]
    spec = scenario("ares", settings)
    outcome = run_scenario(spec, step_times=load_step_time, folders=(data_folder(),))
    return list(preempted(outcome.samples))


def preempted(samples: Sequence[EngineSample]) -> Iterator[Preempted]:
    """Preemptions between samples, with the idle blocks before them.

    Args:
        samples: Of all instances, in the order of time; those of one instant follow each other.
    """
    before: dict[str, EngineSample] = {}
    now: dict[str, EngineSample] = {}
    for sample in samples:
        if now and next(iter(now.values())).at_ns != sample.at_ns:
            before, now = now, {}
        now[sample.instance] = sample
        earlier = before.get(sample.instance)
        if earlier is not None and sample.preemptions > earlier.preemptions:
            yield _of_instant(sample.preemptions - earlier.preemptions, earlier, before)


def _of_instant(count: int, own: EngineSample, before: dict[str, EngineSample]) -> Preempted:
    idle = {name: each.blocks_total - each.blocks_used for name, each in before.items() if name != own.instance}
    decoders = [each for name, each in before.items() if not name.startswith(PREFILL)]
    total, used = sum(each.blocks_total for each in decoders), sum(each.blocks_used for each in decoders)
    return Preempted(
        count=count,
        needed=own.blocks_used / max(1, own.running),
        decoders=sum(blocks for name, blocks in idle.items() if not name.startswith(PREFILL)),
        elsewhere=sum(idle.values()),
        idle=1 - used / max(1, total),
    )


def _cells(runs: Sequence[Sequence[Preempted]]) -> list[str]:
    counts = [float(sum(each.count for each in run)) for run in runs]
    without = [float(sum(each.count for each in run if each.decoders < each.needed)) for run in runs]
    nowhere = [float(sum(each.count for each in run if each.elsewhere < each.needed)) for run in runs]
    idle = [100 * median(each.idle for each in run) for run in runs if run]
    return [figure(values, places=1) for values in (counts, without, nowhere, idle)]


if __name__ == "__main__":
    raise SystemExit(main())
