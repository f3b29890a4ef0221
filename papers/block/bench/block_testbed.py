"""Block's testbed: 12 simulated A30 with Llama-2-7B, ten policies; latencies by rate, capacity, table 2's variations.

    python -m bench block_testbed --rows FILE
    python -m bench block_testbed --requests 2000 --seeds 1 --parts grid --rates 28 32

10,000 ShareGPT requests, Poisson; prompts and answers as long as Block's own (MILLRACE_DATA; else the fitted
distribution that ships). Every actor is the real one; engines are modelled. Forecasts know true lengths; ``forecast*``
knows them as wrongly as Block's tagger does (noise.py beside this). ``(text)`` and ``(code)``: INFaaS++ and Llumnix- as
Block's text prints their load (used memory / batch size) and as its code computes it (free memory / batch size).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec
from millrace.workloads.shape import RequestShape

from bench.scenarios.rows import Row
from bench.scenarios.runs import Options, add_options, options, run_all
from bench.scenarios.scenarios import FRESH, data_folder, scenario, stand_in
from bench.scenarios.tables import GAIN_HEADS, figure, gains, latency_table, table
from papers.block.bench.bound import fluid_bound, resident_tokens
from papers.block.bench.capacity import Capacity, at_rate, capacities
from papers.block.bench.noise import BLOCK_SIGMA, BLOCK_TABLE_1, quality
from papers.block.bench.pictures import draw
from papers.block.bench.variants import POLICIES, policy_settings
from simulator.scenarios.load import arrivals
from simulator.scenarios.spec import ScenarioSpec

RATES = (24.0, 28.0, 30.0, 32.0)
TTFT_S = 3.0
DRAWN = (
    "random",
    "round robin",
    "INFaaS++ (code)",
    "shortest queue",
    "Llumnix- (code)",
    "forecast",
    "forecast*",
    "forecast* d=2",
)
PREDICTED = ("forecast*", "forecast* d=2")

#: Capacities in Block's paper and artefact under TTFT P99 < 3 s, requests/s (NOTES.md, parts A2 and C).
PAPER = {
    "Llumnix- (code)": 30.6,
    "forecast": 32.0,
    "forecast*": 31.1,
    "forecast* d=2": 30.2,
}

#: Table 2: settings, then the paper's capacity of Block, Block*, Llumnix-.
VARIATIONS: dict[str, tuple[tuple[str, ...], tuple[float, float, float], tuple[float, float]]] = {
    "batch cap 24": (("cluster.groups.0.engine.max_sequences=24",), (27.9, 27.2, 23.9), (20.0, 28.0)),
    "chunk 2048": (("cluster.groups.0.engine.token_budget=2048",), (31.5, 30.8, 29.8), (26.0, 34.0)),
    "Qwen2-7B": (
        ("cluster.groups.0.engine.blocks_total=7289", "cluster.groups.0.step_time=a30-qwen2-7b"),
        (68.3, 67.9, 62.0),
        (48.0, 64.0),
    ),
}
#: By how much the answers of another model than Llama-2 might be shorter than those of the trace.
SHORTER = (0.0, 0.1, 0.2, 0.3)


def main() -> int:
    """Runs what is asked for and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, requests=10_000, seeds=3)
    parser.add_argument("--parts", nargs="+", choices=["grid", "capacity", "table2"], default=None)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="of the grid, requests/s")
    parser.add_argument("--policies", nargs="+", default=[*POLICIES, *PREDICTED], help="names as in the tables")
    parser.add_argument("--low", type=float, default=24.0, help="where the search for capacities begins, requests/s")
    parser.add_argument("--tolerance", type=float, default=0.5, help="of capacities, requests/s")
    arguments = parser.parse_args()
    chosen = options(arguments)
    parts = arguments.parts or ["grid", "capacity", "table2"]
    base = _specs([], ["forecast"], chosen)["forecast"]
    print(chosen.told)
    bound = _foundations(base)
    if "grid" in parts:
        specs = _specs([], arguments.policies, chosen)
        _grid(specs, arguments.rates, chosen, bound)
    if "capacity" in parts:
        specs = _specs([], arguments.policies, chosen)
        low, tolerance = arguments.low, arguments.tolerance
        found, rows = capacities(specs, chosen, bound_s=TTFT_S, low=low, high=40.0, tolerance=tolerance)
        print(f"\nCapacity, requests/s: the highest rate with TTFT p99 < {TTFT_S:g} s, to {arguments.tolerance:g}")
        _print_capacities(found, PAPER)
        _check(rows, bound)
    if "table2" in parts:
        _table2(chosen, arguments.tolerance)
    return 0


def _specs(settings: Sequence[str], policies: Sequence[str], chosen: Options) -> dict[str, ScenarioSpec]:
    count = f"workload.count={chosen.requests}"
    return {
        name: scenario("block", [*FRESH, *settings, count, *policy_settings(name, BLOCK_SIGMA)]) for name in policies
    }


def _foundations(spec: ScenarioSpec) -> float:
    """Prints what everything rests on, and gives the bound."""
    if stand_in(spec):
        print(stand_in(spec))
    shapes = [each.shape for each in arrivals(spec.workload, seed=0, folders=(data_folder(),))]
    got = quality([shape.output_tokens for shape in shapes], BLOCK_SIGMA)
    bound = fluid_bound(spec, shapes)
    print(
        f"{len(shapes):,} requests; a decoding sequence has {resident_tokens(shapes):.0f} tokens of context on average"
    )
    print(f"fluid bound: {bound:.1f} requests/s (NOTES.md, with other step times: 36.8)")
    print("predicted lengths: mean error, error rate, within 50 and 100 tokens (Block's tagger in brackets):")
    pairs = zip((got.error_tokens, got.error_rate, got.within_50, got.within_100), BLOCK_TABLE_1, strict=True)
    print("  " + ", ".join(f"{value:.3g} ({of_block:.3g})" for value, of_block in pairs))
    return bound


def _grid(specs: dict[str, ScenarioSpec], rates: Sequence[float], chosen: Options, bound: float) -> None:
    jobs = [
        job
        for name, spec in specs.items()
        for rate in rates
        for job in chosen.variations(name, rate, at_rate(spec, rate))
    ]
    rows = run_all(jobs, chosen)
    for rate in rates:
        print(f"\n{rate:g} requests/s")
        print(latency_table(list(specs), [row for row in rows if row.rate == rate]))
    _gains(rows, rates)
    _check(rows, bound)
    labels = [name for name in DRAWN if name in specs]
    drawn = draw("block-testbed", rows, axis="requests/s", labels=labels, line_s=TTFT_S)
    print(f"drawn: {drawn.name}", file=sys.stderr)


def _gains(rows: Sequence[Row], rates: Sequence[float]) -> None:
    """Print the gains of the paper at QPS 32, and those of the runs at each rate.

    The paper's gains of TTFT are read as mean and P99 of Block, then of Block*.
    """
    paper = ("-88.1", "-78.6", "-19.9", "-3.6", "+4.4"), ("-23.6", "-10.8", "-12.6", "-0.8", "+2.5")
    lines = [["Block's paper at 32: Block", *paper[0]], ["Block's paper at 32: Block*", *paper[1]]]
    for rate in rates:
        at = [row for row in rows if row.rate == rate]
        for name in ("forecast", "forecast*"):
            if cells := gains(at, name, "Llumnix- (code)"):
                lines.append([f"{name} at {rate:g}", *cells])
    print("\nAgainst Llumnix- (code), %, paired by seed")
    print(table(["", *GAIN_HEADS], lines))


def _check(rows: Sequence[Row], bound: float) -> None:
    """No run may finish more per second than the fluid bound."""
    best = max(rows, key=lambda row: row.throughput)
    print(
        f"most finished: {best.throughput:.2f} requests/s by {best.label}, {best.throughput / bound:.0%} of the bound"
    )
    if best.throughput > bound:
        raise SystemExit("bench: a run passed the fluid bound: the simulation is wrong")


def _print_capacities(found: Sequence[Capacity], paper: dict[str, float]) -> None:
    lines = [
        [each.label, figure(each.rates, places=1), f"{paper[each.label]:g}" if each.label in paper else "-"]
        for each in found
    ]
    print(table(["", "here", "Block"], lines))


def _table2(chosen: Options, tolerance: float) -> None:
    print(f"\nTable 2's variations: capacity, requests/s, to {tolerance:g}; {chosen.told}")
    names = ("forecast", "forecast*", "Llumnix- (code)")
    lines = []
    for variation, (settings, paper, (low, high)) in VARIATIONS.items():
        specs = _specs(settings, names, chosen)
        found, rows = capacities(specs, chosen, bound_s=TTFT_S, low=low, high=high, tolerance=tolerance)
        shapes = [each.shape for each in arrivals(specs["forecast"].workload, seed=0, folders=(data_folder(),))]
        bound = fluid_bound(specs["forecast"], shapes)
        _check(rows, bound)
        cells = [figure(each.rates, places=1) for each in found]
        lines.append([variation, *cells, f"{bound:.1f}", " / ".join(f"{value:g}" for value in paper)])
    print(table(["", *names, "bound", "Block / Block* / Llumnix-"], lines))
    _shorter_answers(chosen)


def _shorter_answers(chosen: Options) -> None:
    """Bounds of Qwen2-7B, whose own lengths are not published: the trace has those of Llama-2's answers and tokens."""
    spec = _specs(VARIATIONS["Qwen2-7B"][0], ["forecast"], chosen)["forecast"]
    shapes = [each.shape for each in arrivals(spec.workload, seed=0, folders=(data_folder(),))]
    bounds = ((share, fluid_bound(spec, _shortened(shapes, share))) for share in SHORTER)
    print("Bound of Qwen2-7B with answers so much shorter than Llama-2's, which these runs replay (Block, 6.6):")
    print("  " + ", ".join(f"{share:.0%}: {bound:.1f}" for share, bound in bounds))


def _shortened(shapes: Sequence[RequestShape], share: float) -> list[RequestShape]:
    """The same requests with answers that are shorter by a share."""
    return [
        msgspec.structs.replace(shape, output_tokens=max(2, round(shape.output_tokens * (1 - share))))
        for shape in shapes
    ]
