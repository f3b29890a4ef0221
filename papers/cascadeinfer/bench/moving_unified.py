"""Everything on against each paper's part alone, on four traces: end-to-end, first tokens, time per token.

    python -m bench moving_unified --rows FILE
    python -m bench moving_unified --rows FILE --traces ShareGPT

Four instances at a share of the fluid bound; a seed is another part of the trace. `queue`: join the shortest queue, and
nothing moves. `Block`: dispatch by forecast. `CascadeInfer`: stages by its two-phase heuristic and trades between them.
`ARES`: dispatch by present load, running requests move by future load. `split`: one or three instances prefill, as
FlowKV's start. `all`: dispatch by forecast, stages where the planner finds them better, running requests move by delay;
`all, one stage`: the same without stages; `all, summed`: as `all`, and dispatch always sums the delay of others
(decision 0009).
Lengths are predicted with the noise of Block's tagger where a part looks at them, and by survival once outrun.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from bench.scenarios.rows import Row
from bench.scenarios.runs import Job, Options, add_options, options, run_all
from bench.scenarios.scenarios import scenario, stand_in
from bench.scenarios.tables import figure, table
from papers import PAPERS
from papers.block.bench.block_beyond import TRACES, Trace, played
from papers.block.bench.noise import BLOCK_SIGMA

#: A trace by its name in the tables, and the instances of it that prefill where the two are split.
CASES: dict[str, tuple[Trace, int]] = {
    "Azure conversation": (TRACES["Azure conversation"], 1),
    "Mooncake conversation": (TRACES["Mooncake conversation"], 3),
    "ServeGen R1": (TRACES["ServeGen R1"], 1),
    "ShareGPT": (
        Trace(
            step_time="a100-llama-3-8b",
            blocks=9_000,
            length_max=4_096,
            lengths='kind="trace", format="sharegpt", path="sharegpt_block_10k/sharegpt_val_10k_llama2.csv"',
            load=0.8,
        ),
        1,
    ),
}
KNOWN = ("prediction.kind=noisy", f"prediction.sigma={BLOCK_SIGMA}", "prediction.asked=always")
FORECAST = ("dispatch.policy=forecast", "dispatch.parameters.candidates=0")
MOVES = ("migration.on=true",)
REASONS = 'trading.reasons=["drain", "handoff", "memory", "boundary", "balance"]'
ALL = (*MOVES, *KNOWN, *FORECAST, "stages.policy=exact", "trading.policy=delay", REASONS)
PARTS: dict[str, tuple[str, ...]] = {
    "queue": ("dispatch.policy=join_shortest_queue",),
    "Block": (*FORECAST, *KNOWN),
    "CascadeInfer": (
        *MOVES,
        "dispatch.policy=join_shortest_queue",
        f"stages.policy={PAPERS}/cascadeinfer/two_phase.py",
        f"trading.policy={PAPERS}/cascadeinfer/trading.py",
    ),
    "ARES": (*MOVES, *KNOWN, f"dispatch.policy={PAPERS}/block/llumnix.py", f"trading.policy={PAPERS}/ares/trading.py"),
    "split": (*MOVES, "dispatch.policy=join_shortest_queue", "trading.policy=none"),
    "all": ALL,
    "all, one stage": tuple(setting for setting in ALL if not setting.startswith("stages.")),
    "all, summed": (*ALL, "dispatch.parameters.others_summed=always"),
}
VALUES: tuple[tuple[str, Callable[[Row], float | None], float, int], ...] = (
    ("e2e mean s", lambda row: row.e2e_mean, 1.0, 2),
    ("e2e p99 s", lambda row: row.e2e_p99, 1.0, 1),
    ("TTFT mean s", lambda row: row.ttft_mean, 1.0, 2),
    ("TTFT p99 s", lambda row: row.ttft_p99, 1.0, 2),
    ("TPOT mean ms", lambda row: row.tpot_mean, 1e3, 1),
    ("TPOT p99 ms", lambda row: row.tpot_p99, 1e3, 1),
    ("preempted", lambda row: row.preemptions, 1.0, 0),
    ("moved", lambda row: row.moved, 1.0, 0),
)
WARM_UP = 5


def main() -> int:
    """Runs the parts on each trace and prints tables; fails where a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, requests=1_000, seeds=3)
    parser.add_argument("--traces", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    arguments = parser.parse_args()
    chosen = options(arguments)
    print(f"{chosen.told}; the first fifth of each is warm-up")
    lost = 0
    for name in arguments.traces:
        jobs = _jobs(chosen, *CASES[name])
        if not jobs:
            print(f"\n{name}: skipped, its trace is not under MILLRACE_DATA")
            continue
        rows = run_all(jobs, chosen)
        lost += sum(row.lost for row in rows)
        rates = sorted({row.rate for row in rows})
        trace = CASES[name][0]
        title = f"{name}, {rates[0]:.1f} to {rates[-1]:.1f} requests/s on {trace.instances} x {trace.step_time}"
        print(f"\n{title}, {trace.load:.0%} of the fluid bound\n{_table(rows)}\n\n{_changes(rows)}")
    return int(lost > 0)


def _jobs(chosen: Options, trace: Trace, prefilling: int) -> list[Job]:
    size = [f"workload.count={chosen.requests}", f"workload.warm_up={chosen.requests // WARM_UP}"]
    jobs: list[Job] = []
    for seed in range(chosen.seeds):
        skip = 0 if "servegen" in trace.lengths else seed * chosen.requests
        part = [*trace.settings(), *size, f"seed={seed}", f"workload.lengths.skip={skip}"]
        timed = "sharegpt" not in trace.lengths
        first = scenario("block", part if timed else [*part, 'workload.arrivals={kind="poisson", rate_per_s=1.0}'])
        if stand_in(first):
            return []
        rate, speed = played(first, trace.load)
        times = f'{{kind="trace", speed={speed}}}' if timed else f'{{kind="poisson", rate_per_s={rate}}}'
        for label, settings in PARTS.items():
            split = _roles(trace.instances, prefilling) if label == "split" else []
            spec = scenario("block", [*part, f"workload.arrivals={times}", *settings, *split])
            jobs.append(Job(label=label, rate=rate, spec=spec))
    return jobs


def _roles(instances: int, prefilling: int) -> list[str]:
    return [f"migration.roles.gpu-{n}={'prefill' if n < prefilling else 'decode'}" for n in range(instances)]


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for label in PARTS:
        own = [row for row in rows if row.label == label]
        cells = [
            figure([scale * known for row in own if (known := value(row)) is not None], places=places)
            for _, value, scale, places in VALUES
        ]
        lines.append([label, *cells])
    return table(["", *(head for head, _, _, _ in VALUES)], lines)


def _changes(rows: Sequence[Row]) -> str:
    """Of `all` against each other one, percent, paired by seed."""
    mine = {row.seed: row for row in rows if row.label == "all"}
    lines = []
    for label in (name for name in PARTS if name != "all"):
        theirs = [row for row in rows if row.label == label and row.seed in mine]
        cells = []
        for _, value, _, _ in VALUES[:6]:
            pairs = [(value(mine[row.seed]), value(row)) for row in theirs]
            known = [100 * (own / other - 1) for own, other in pairs if own is not None and other]
            cells.append(figure([each for each in known if math.isfinite(each)], places=1))
        lines.append([label, *cells])
    return table(["% of `all` against", *(head.rpartition(" ")[0] for head, _, _, _ in VALUES[:6])], lines)
