"""Time of a stage plan on E instances; distance of each planner from the best layout of the same objective.

Lengths are log-normal; rates are in proportion to E. Times are processor time of one plan, tables and search, median of
repeats. Regret is under the objective itself (what the planner minimises), without margins; brute force takes every
layout where that is possible. Aims: exact at most 60 ms (16), 0.5 s (256), 1 s (1,000).

    python -m bench stage_planner --regret --plans 50 --rows FILE

runs the planners' layouts and drawn ones instead, neighbours of the exact layout and random ones (modelled H200,
hand-over, cuts as planned, each from its own steady state). Runs that are long beside their sequences' lives tell which
layouts bear the load: R1's live for a minute.

Source: CascadeInfer, section 6.5 (0.06 s at 16 instances and 128K tokens).
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.policies.stages import search
from millrace.policies.stages.instance import InstanceModel, linear_instance
from millrace.policies.stages.objectives import (
    Constraints,
    StageCosts,
    candidate_edges,
    fair,
    open_costs,
)
from millrace.policies.stages.statistics import LengthStatistics, statistics_of

from papers.cascadeinfer.bench.stages.regret import regret
from papers.cascadeinfer.bench.stages.runs import add_options, options
from papers.cascadeinfer.bench.stages.setups import Setup
from papers.cascadeinfer.equation1 import QualityModel, quality_costs
from papers.cascadeinfer.search import chain, two_phase

SET = "h200-llama-3-8b"
KV_TOKENS = 900_000
#: Requests per second and instance, of 500 prompt and about 1,700 output tokens: light, medium, high.
RATES = (0.3, 0.9, 1.5)
REQUESTS = 3000
#: Brute force is done for so many cuts and instances.
SMALL_CUTS, SMALL_INSTANCES = 7, 6

PLANNERS: dict[str, Callable[[StageCosts], list[search.Part] | None]] = {
    "exact": search.exact,
    "two_phase": two_phase,
    "chain": chain,
}


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[16, 256, 1000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--regret", action="store_true", help="simulate layouts instead")
    parser.add_argument("--plans", type=int, default=50, help="drawn layouts (default %(default)s)")
    parser.add_argument("--requests", type=int, default=800, help="of each simulated run (default %(default)s)")
    parser.add_argument("--trace", default="R1", help="lengths of simulated runs (default %(default)s)")
    parser.add_argument("--load", type=float, default=0.8, help="share of the fluid bound (default %(default)s)")
    parser.add_argument("--on", type=int, default=8, help="instances of simulated runs (default %(default)s)")
    add_options(parser, seeds=5)
    arguments = parser.parse_args()
    if arguments.regret:
        setup = Setup(
            trace=arguments.trace,
            instances=arguments.on,
            load=arguments.load,
            requests=arguments.requests,
            warm=True,
        )
        print(regret(setup, options(arguments), plans=arguments.plans))
        return 0
    model = linear_instance(load_step_time(SET).cost(EngineParameters()), kv_tokens=KV_TOKENS, max_sequences=1024)
    print(f"seeds 0 to {arguments.seeds - 1}; {SET}")
    _times(model, arguments.instances, arguments.repeats)
    _regret(model, arguments.seeds)
    _brute_force(model, arguments.seeds)
    return 0


def lengths(seed: int, rate: float) -> LengthStatistics:
    """Statistics of one draw."""
    rng = random.Random(seed)
    prompts = [max(1, round(rng.lognormvariate(math.log(300), 1.0))) for _ in range(REQUESTS)]
    outputs = [max(1, min(60_000, round(rng.lognormvariate(math.log(800), 1.2)))) for _ in range(REQUESTS)]
    return statistics_of(prompts, outputs, span_s=REQUESTS / rate)


def tables(
    statistics_: LengthStatistics, model: InstanceModel, instances: int, objective: str, *, per_octave: int = 4
) -> StageCosts:
    """Tables as the policies make them, without the margins."""
    edges = candidate_edges(statistics_, per_octave)
    if objective == "open":
        return fair(open_costs(statistics_, model, edges, instances, Constraints()), Constraints().slowdown_max)
    quality = QualityModel(d0=model.fixed_s, d1=model.per_decode_s, d4=model.per_context_token_s)
    return quality_costs(statistics_, quality, edges, instances)


def _times(model: InstanceModel, counts: list[int], repeats: int) -> None:
    print(f"\n{'instances':>9}{'cuts':>6}{'tables ms':>11}" + "".join(f"{name + ' ms':>14}" for name in PLANNERS))
    for instances in counts:
        found = lengths(0, RATES[1] * instances)
        made, spent = [], {name: [] for name in PLANNERS}  # type: tuple[list[float], dict[str, list[float]]]
        for _ in range(repeats):
            began = time.process_time()
            costs = tables(found, model, instances, "open")
            made.append(time.process_time() - began)
            for name, planner in PLANNERS.items():
                began = time.process_time()
                planner(costs)
                spent[name].append(time.process_time() - began)
        figures = "".join(f"{1e3 * statistics.median(each):>14.1f}" for each in spent.values())
        print(f"{instances:>9}{len(costs.edges) - 2:>6}{1e3 * statistics.median(made):>11.1f}{figures}", flush=True)


def _regret(model: InstanceModel, seeds: int) -> None:
    """Cost over that of the exact search, 16 instances."""
    print(
        f"\n{'objective':<10}{'req/s':>6}{'one stage':>11}{'two_phase':>11}{'octaves':>9}{'chain':>9}  stages of exact"
    )
    for objective, per_instance in itertools.product(("open", "quality"), RATES):
        rows = [_row(model, objective, per_instance * 16, seed) for seed in range(seeds)]
        columns = [_mean([row[k] for row in rows]) for k in range(4)]
        stages = ", ".join(str(row[4]) for row in rows)
        figures = "".join(f"{each:>{width}}" for each, width in zip(columns, (11, 11, 9, 9), strict=True))
        print(f"{objective:<10}{per_instance * 16:>6.1f}{figures}  {stages}", flush=True)


def _row(model: InstanceModel, objective: str, rate: float, seed: int) -> tuple[float, float, float, float, int]:
    found = lengths(seed, rate)
    costs, octaves = (tables(found, model, 16, objective, per_octave=k) for k in (4, 1))
    best = search.exact(costs)
    assert best is not None
    least = search.total(costs, best)
    one = search.total(costs, [(0, len(costs.edges) - 1, 16)])
    others = [two_phase(costs), two_phase(octaves), chain(costs)]
    totals = [
        math.inf if parts is None else search.total(table, parts)
        for parts, table in zip(others, (costs, octaves, costs), strict=True)
    ]
    return one / least - 1, totals[0] / least - 1, totals[1] / least - 1, totals[2] / least - 1, len(best)


def _mean(values: list[float]) -> str:
    """Over the seeds; a layout that violates a constraint has no cost."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "none"
    lacking = len(values) - len(finite)
    return f"{sum(finite) / len(finite):+.1%}" + (f"/{lacking}" if lacking else "")


def _brute_force(model: InstanceModel, seeds: int) -> None:
    """Every layout of a few cuts and instances."""
    equal = layouts = runs = 0
    for seed, objective, instances in itertools.product(
        range(seeds), ("open", "quality"), range(1, SMALL_INSTANCES + 1)
    ):
        found = lengths(seed, RATES[1] * instances)
        full = tables(found, model, instances, objective)
        kept = full.edges[:: max(1, len(full.edges) // SMALL_CUTS)][:SMALL_CUTS]
        costs = _thinned(full, (*kept[:-1], full.edges[-1]))
        totals = [search.total(costs, parts) for parts in every_layout(len(costs.edges) - 1, instances)]
        best = search.exact(costs)
        value = math.inf if best is None else search.total(costs, best)
        equal += math.isclose(value, min(totals), rel_tol=1e-9) or value == min(totals)
        layouts, runs = layouts + len(totals), runs + 1
    print(f"\nexact equals brute force in {equal} of {runs} cases, {layouts} layouts")


def _thinned(costs: StageCosts, edges: tuple[int, ...]) -> StageCosts:
    """The tables of fewer cuts."""
    at = [costs.edges.index(edge) for edge in edges]
    pick = [[row] for row in at]
    return StageCosts(
        edges=edges,
        cost=costs.cost[pick, at],
        pace_s=costs.pace_s[pick, at],
        cut=costs.cut[at],
        sequences=costs.sequences[pick, at],
        context=costs.context[pick, at],
    )


def every_layout(cuts: int, instances: int) -> Iterator[list[search.Part]]:
    """All partitions of tiers and instances."""
    for stages in range(1, min(cuts, instances) + 1):
        for inner in itertools.combinations(range(1, cuts), stages - 1):
            bounds = [0, *inner, cuts]
            for split in itertools.combinations(range(1, instances), stages - 1):
                marks = [0, *split, instances]
                yield [(bounds[k], bounds[k + 1], marks[k + 1] - marks[k]) for k in range(stages)]


if __name__ == "__main__":
    sys.exit(main())
