"""Forecast, the default policy, against rules that use no lengths, by scenario and by how well lengths are known.

    python -m bench forecast_default --rows FILE
    python -m bench forecast_default --scenarios mixed@28 --qualities oracle none --seeds 1

The simple rules are join-shortest-queue, Llumnix's, and those of LMetric, llm-d, SGLang and Dynamo (bench/policies).
Scenarios: ``mixed@RATE`` (examples/scenarios/mixed.toml: half of the instances twice as fast, SLO of 1 s and 60 ms),
``block@RATE`` (twelve equal instances), ``burst@CV`` (the same with gamma arrivals), ``halves@RATE`` (six and six), and
``trace@NAME`` (those of block_beyond, at its share of the fluid bound); theirs is an SLO of 3 s and 100 ms. Qualities:
the true length, noise of 0.5 and 1.0 (Block, section 6.3), and nothing. ``--summed`` says when the delay of others is
their sum.
The last column is the largest loss in any figure against the best of the simple rules in that figure. With several
seeds a second table has the difference from that rule in each figure, paired by seed, with its 95 % interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import msgspec
from millrace.cluster.toml_text import inline

from bench.scenarios.rows import Row, select
from bench.scenarios.runs import Job, Options, add_options, options, run_all
from bench.scenarios.scenarios import FRESH, scenario
from bench.scenarios.tables import GAIN_HEADS, figure
from bench.scenarios.tables import table as columns
from papers import PAPERS
from papers.block.bench.block_beyond import BURST_RATE, MIXED, TRACES, played

SCENARIOS = (
    "mixed@24",
    "mixed@28",
    "block@28",
    "block@31",
    "burst@4",
    "halves@42",
    *(f"trace@{name}" for name in TRACES),
)
RIVALS = Path(__file__).parent / "policies"
SIMPLE = {
    "join_shortest_queue": "join_shortest_queue",
    "llumnix": f"{PAPERS}/block/llumnix.py",
    **{name: f"{RIVALS}/{name}.py" for name in ("lmetric", "shortest_uncached", "llm_d", "sglang", "dynamo")},
}
QUALITIES = {
    "oracle": (),
    "noise 0.5": ("prediction.kind=noisy", "prediction.sigma=0.5"),
    "noise 1.0": ("prediction.kind=noisy", "prediction.sigma=1.0"),
    "none": ("prediction.kind=none",),
}
FIGURES = ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99")
SLO = ("slo.ttft_ms=3000", "slo.tpot_ms=100")


def main() -> int:
    """A table for each scenario."""
    parser = argparse.ArgumentParser(prog="python -m bench forecast_default", description=__doc__)
    add_options(parser, requests=1_500, seeds=3)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS))
    parser.add_argument("--qualities", nargs="+", choices=list(QUALITIES), default=list(QUALITIES))
    parser.add_argument(
        "--summed", nargs="+", choices=("preempting", "always"), default=[], help="more than its default"
    )
    parser.add_argument("--policies", nargs="+", default=["forecast"], help="that use lengths: names, or files")
    arguments = parser.parse_args()
    chosen = options(arguments)
    print(chosen.told)
    for name in arguments.scenarios:
        rows = run_all(jobs(name, arguments, chosen), chosen)
        print(f"\n{name}\n{table(rows)}", flush=True)
        if chosen.seeds > 1:
            print(differences(rows), flush=True)
    return 0


def jobs(name: str, arguments: argparse.Namespace, chosen: Options) -> list[Job]:
    """Simple rules once, the others with every quality."""
    found = []
    for seed in range(chosen.seeds):
        file, settings = base(name, chosen.requests, seed)
        for label, policy in SIMPLE.items():
            spec = scenario(file, [*settings, f"dispatch.policy={policy}"])
            found.append(Job(label=label, rate=0.0, spec=spec))
        for quality in arguments.qualities:
            for label, dispatch in dispatches(arguments.policies, arguments.summed):
                spec = scenario(file, [*settings, *dispatch, *QUALITIES[quality]])
                found.append(Job(label=f"{label}, {quality}", rate=0.0, spec=spec))
    return found


def dispatches(policies: Sequence[str], summed: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each policy as it is, or with each way to add up the delay of others."""
    key = "dispatch.parameters.others_summed"
    ways = [(f" {way}", [f"{key}={way}"]) for way in summed] or [("", [])]
    return [(f"{each}{name}", [f"dispatch.policy={each}", *more]) for each in policies for name, more in ways]


def base(name: str, requests: int, seed: int) -> tuple[str, list[str]]:
    """A scenario's file, and settings on top of it."""
    kind, _, value = name.partition("@")
    common = [f"workload.count={requests}", f"workload.warm_up={requests // 10}", f"seed={seed}"]
    rate = f"workload.arrivals.rate_per_s={value}"
    if kind == "mixed":
        return "mixed", [*common, rate]
    common += [*FRESH, *SLO]
    if kind == "block":
        return "block", [*common, rate]
    if kind == "burst":
        return "block", [*common, f'workload.arrivals={{kind="gamma", rate_per_s={BURST_RATE}, cv={value}}}']
    if kind == "halves":
        return "block", [*common, rate, f"cluster.groups={halves()}"]
    trace = TRACES[value]
    skip = 0 if "servegen" in trace.lengths else seed * requests
    common += [*trace.settings(), f"workload.lengths.skip={skip}"]
    _, speed = played(scenario("block", common), trace.load)
    return "block", [*common, f'workload.arrivals={{kind="trace", speed={speed}}}']


def halves() -> str:
    """Six instances as on Block's testbed and six twice as fast, as TOML."""
    (group,) = scenario("block", MIXED).cluster.groups
    fast = msgspec.structs.replace(group, name="fast", speed=2.0)
    return inline(msgspec.to_builtins([group, fast]))


def table(rows: Sequence[Row]) -> str:
    """Means over seeds by label."""
    labels = list(dict.fromkeys(row.label for row in rows))
    means = {label: figures(select(rows, label)) for label in labels}
    simple = [means[label] for label in SIMPLE]
    best = {name: min(each[name] for each in simple) for name in FIGURES}
    goodput = max(each["goodput"] for each in simple)
    lines = [f"{'':<34}{'TTFT':>8}{'p99':>8}{'e2e':>8}{'p99':>8}{'in SLO':>8}{'preempt.':>9}{'worst':>8}"]
    for label, each in means.items():
        losses = [each[name] / best[name] - 1 for name in FIGURES] + [1 - each["goodput"] / goodput]
        lines.append(
            f"{label:<34}{each['ttft_mean']:8.3f}{each['ttft_p99']:8.2f}{each['e2e_mean']:8.2f}{each['e2e_p99']:8.2f}"
            f"{each['goodput']:8.1%}{each['preemptions']:9.0f}{max(losses):+8.1%}"
        )
    return "\n".join(lines)


def differences(rows: Sequence[Row]) -> str:
    """Percent by which each label's figures are above those of the simple rule with the best mean, paired by seed."""
    simple = {name: figures(select(rows, name)) for name in SIMPLE}
    lines = []
    for label in dict.fromkeys(row.label for row in rows if row.label not in SIMPLE):
        cells = []
        for name in FIGURES:
            means = {rule: simple[rule][name] for rule in SIMPLE}
            rule = min(means, key=means.__getitem__)
            theirs = {row.seed: getattr(row, name) for row in select(rows, rule)}
            shares = [100 * (getattr(row, name) / theirs[row.seed] - 1) for row in select(rows, label)]
            cells.append(figure(shares, places=1))
        lines.append([label, *cells])
    return columns(["% against the best simple rule", *GAIN_HEADS[: len(FIGURES)]], lines)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Means over seeds."""
    names = (*FIGURES, "goodput", "preemptions")
    return {name: mean(float(getattr(row, name) or 0.0) for row in rows) for name in names}
