"""Length stages and trading against dispatch alone: latency, SLO, by trace and kappa, split into their parts.

    python -m bench stages_headline --rows FILE
    python -m bench stages_headline --parts split --kappa 0.2 --seeds 1

Eight modelled H200; the rate is a share of the fluid bound without a penalty. Parts: ``split`` (R1 lengths, each
mechanism switched on by itself and one after the other, beside all baselines), ``kappa`` (R1, from kernels that split
to the paper's largest penalty), ``traces`` (the other three), ``light`` (0.3 of the bound, and equal lengths). Layouts
are those of ``exact`` for the trace's own lengths: what it would plan after its first minutes. ``steady`` is R1 where
each layout begins with as many residents as it holds itself. In ``learnt`` (a longer run that begins empty; R1 where no
traces are named) the coordinator plans in the run. ``capacity`` searches the highest load at
which 90 percent of the requests keep the SLO, in one stage and with the layout planned for that load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import mean

from bench.scenarios.tables import figure
from papers.cascadeinfer.bench.stages.capacity import capacity_table
from papers.cascadeinfer.bench.stages.runs import RunOptions, StageRow, add_options, options, run_all
from papers.cascadeinfer.bench.stages.setups import TRACES, Setup, merged, told
from papers.cascadeinfer.bench.stages.tables import comparison, paired
from papers.cascadeinfer.bench.stages.variants import (
    BASE,
    BASELINES,
    Layer,
    full,
    hand_over,
    learnt,
    refined,
    steps,
    trading,
)

KAPPAS = (0.0, 0.2, 0.76)

#: All requests alike.
UNIFORM = {"kind": "log_normal", "prompt_mean": 500, "output_mean": 1_000, "prompt_sigma": 0.05, "output_sigma": 0.05}


def main() -> int:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seeds=3)
    parts: dict[str, Callable[[RunOptions, argparse.Namespace], None]] = {
        "split": _split,
        "kappa": _kappa,
        "traces": _traces,
        "light": _light,
        "steady": _steady,
        "learnt": _learnt,
        "capacity": _capacity,
    }
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--kappa", type=float, default=0.2, help="of the parts split and traces")
    parser.add_argument("--load", type=float, default=0.8, help="share of the fluid bound (default %(default)s)")
    parser.add_argument("--labels", nargs="+", default=[], help="of the parts split and traces, these alone")
    parser.add_argument("--traces", nargs="+", choices=list(TRACES), help="of the parts traces and capacity, these")
    parser.add_argument("--instances", type=int, default=8, help="of the part learnt (default %(default)s)")
    parser.add_argument("--longer", type=int, default=1, help="times the requests of a run (default %(default)s)")
    arguments = parser.parse_args()
    for name in arguments.parts:
        parts[name](options(arguments), arguments)
    return 0


def _split(chosen: RunOptions, arguments: argparse.Namespace) -> None:
    setup = Setup(kappa=arguments.kappa, load=arguments.load)
    layers = {**BASELINES, **steps(setup.planned("exact"))}
    _compare(setup, _kept(layers, arguments), chosen)


def _kappa(chosen: RunOptions, arguments: argparse.Namespace) -> None:
    for kappa in KAPPAS:
        _compare_few(Setup(kappa=kappa, load=arguments.load), chosen)


def _traces(chosen: RunOptions, arguments: argparse.Namespace) -> None:
    for trace in arguments.traces or [each for each in TRACES if each != "R1"]:
        requests = arguments.longer * TRACES[trace].requests
        setup = Setup(trace=trace, kappa=arguments.kappa, load=arguments.load, requests=requests)
        shapes = setup.planned("exact")
        layers = {BASE: BASELINES[BASE], **steps(shapes)} if len(shapes) > 1 else {BASE: BASELINES[BASE]}
        _compare(setup, _kept(layers, arguments, ("balance", "hand-over", "+ trade")), chosen)


def _capacity(chosen: RunOptions, arguments: argparse.Namespace) -> None:
    for trace in arguments.traces or TRACES:
        setup = Setup(trace=trace, kappa=arguments.kappa, requests=arguments.longer * TRACES[trace].requests)
        print(f"\n{trace}, kappa {setup.kappa:g}, {setup.count} requests")
        print(capacity_table(setup, chosen), flush=True)


def _kept(layers: dict[str, Layer], arguments: argparse.Namespace, few: Sequence[str] = ()) -> dict[str, Layer]:
    """The labels that are asked for; without any, all or a few of them."""
    wanted = arguments.labels or few or list(layers)
    return {label: layer for label, layer in layers.items() if label == BASE or label in wanted}


def _light(chosen: RunOptions, arguments: argparse.Namespace) -> None:
    _compare_few(Setup(kappa=arguments.kappa, load=0.3), chosen)
    uniform = Setup(
        trace="ShareGPT",
        kappa=arguments.kappa,
        load=0.3,
        requests=1_500,
        changes={"workload": {"lengths": UNIFORM, "arrivals": {"kind": "poisson", "rate_per_s": 60.0}}},
    )
    print("\nequal lengths, 500 + 1,000 tokens, 60 requests/s")
    _print(uniform, {BASE: BASELINES[BASE], "balance": trading("delay")}, chosen)


def _steady(chosen: RunOptions, arguments: argparse.Namespace) -> None:
    for kappa in KAPPAS:
        setup = Setup(kappa=kappa, load=arguments.load)
        shapes = setup.planned("exact")
        own = setup.from_own(shapes)
        layers: dict[str, Layer] = {
            BASE: BASELINES[BASE],
            "Llumnix, early": BASELINES["Llumnix, early"],
            "hand-over": merged(hand_over(shapes), own),
            "+ refinement": merged(refined(shapes), own),
        }
        _compare(setup, _kept(layers, arguments), chosen)


def _learnt(chosen: RunOptions, arguments: argparse.Namespace) -> None:
    for trace in arguments.traces or ["R1"]:
        setup = Setup(
            trace=trace,
            kappa=arguments.kappa,
            load=arguments.load,
            instances=arguments.instances,
            requests=arguments.longer * TRACES[trace].requests * arguments.instances // 8,
            steady=False,
        )
        shapes = setup.planned("exact")
        layers = {
            BASE: BASELINES[BASE],
            "planned before": hand_over(shapes),
            "planned in the run, bounds not told": learnt({}),
            "planned in the run": learnt(setup.bounds),
            "planned in the run, refined": learnt(setup.bounds, refinement={}),
        }
        _compare(setup, _kept(layers, arguments), chosen)


def _compare_few(setup: Setup, chosen: RunOptions) -> None:
    shapes = setup.planned("exact")
    layers: dict[str, Layer] = {BASE: BASELINES[BASE], "balance": trading("delay")}
    if len(shapes) > 1:
        layers["hand-over"] = hand_over(shapes)
        layers["+ trade"] = full(shapes, refinement={})
    _compare(setup, layers, chosen)


def _compare(setup: Setup, layers: dict[str, Layer], chosen: RunOptions) -> None:
    rate = f"{setup.rate_per_s():.1f} requests/s, {setup.load:.0%} of the fluid bound"
    print(f"\n{setup.trace}, kappa {setup.kappa:g}, {rate}; exact: {told(setup.planned('exact'))}")
    _print(setup, layers, chosen)


def _print(setup: Setup, layers: dict[str, Layer], chosen: RunOptions) -> None:
    rows = run_all(chosen.jobs({label: setup.spec(layer) for label, layer in layers.items()}), chosen)
    print(comparison(rows, BASE), flush=True)
    staged = [label for label in layers if label in ("hand-over", "+ refinement", "+ trade")]
    for label in staged:
        print(f"  {label}: slowest decile {_slowest(rows, label)} times as slow as in one stage", flush=True)


def _slowest(rows: Sequence[StageRow], label: str) -> str:
    """Of the ten deciles of the total length, the largest mean over seeds of what it takes against the base."""
    ratios = [_ratios(rows, label, decile) for decile in range(10)]
    return figure(max((each for each in ratios if each), key=mean, default=[]), places=2)


def _ratios(rows: Sequence[StageRow], label: str, decile: int) -> list[float]:
    return [ours / theirs for ours, theirs in paired(rows, label, BASE, lambda row: row.deciles[decile])]


if __name__ == "__main__":
    sys.exit(main())
