"""Role assignments as scenarios: what the whole simulated cluster makes of what the planner says of each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import msgspec
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.parameters import EngineParameters
from millrace.workloads.arrivals import Poisson
from millrace.workloads.lengths import load_fitted

from bench.scenarios.scenarios import scenario
from bench.scenarios.tables import figure, table
from papers.flowkv.assignment import AssignmentTargets, RatedAssignment, rate
from papers.flowkv.mix import InstanceShape, MixMember
from simulator.scenarios.running import run_scenario
from simulator.scenarios.spec import ScenarioSpec
from simulator.scenarios.statistics import summarise

GBPS = 400.0
TOKEN_BYTES = 131_072
LENGTH_MAX = 16_384

#: The planner sees another draw of the load than the runs that judge it.
PLANNER_SEED = 1_000


class AssignmentLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load and its objectives. ``lengths``: a set that ships."""

    name: str
    lengths: str
    rate_per_s: float
    targets: AssignmentTargets


class AssignedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the whole cluster."""

    key: str
    within: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    lost: int
    served: int


def shape(name: str, device: str, step_time: str, *, devices: int = 1, blocks: int) -> InstanceShape:
    """An instance of a step-time set that ships, with vLLM's default limits."""
    parameters = EngineParameters(max_model_len=LENGTH_MAX, blocks_total=blocks, prefix_caching=False)
    return InstanceShape(
        name=name,
        device=device,
        devices=devices,
        cost=load_step_time(step_time).cost(parameters),
        parameters=parameters,
        token_transfer_ns=round(8 * TOKEN_BYTES / GBPS),
    )


def sample(load: AssignmentLoad, count: int, seed: int) -> list[ReplicaRequest]:
    """Requests for the planner."""
    source, rng = load_fitted(load.lengths), Random(f"{seed}/planner")
    times = Poisson(rate_per_s=load.rate_per_s).times_ns(Random(f"{seed}/planner arrivals"))
    found = []
    for _ in range(count):
        drawn = source.draw(rng)
        prompt = min(drawn.prompt_tokens, LENGTH_MAX - 2)
        found.append(ReplicaRequest(next(times), prompt, min(drawn.output_tokens, LENGTH_MAX - 1 - prompt)))
    return found


def planned(load: AssignmentLoad, mixes: Mapping[str, Sequence[MixMember]], count: int) -> dict[str, RatedAssignment]:
    """The planner's ratings by the mixes' names."""
    requests = sample(load, count, PLANNER_SEED)
    return {name: rate(requests, tuple(mix), load.targets) for name, mix in mixes.items()}


def spec_of(
    load: AssignmentLoad, mix: Sequence[MixMember], sets: Mapping[str, str], *, count: int, seed: int
) -> ScenarioSpec:
    """A scenario with a group for each member. ``sets``: step-time set by the shape's name."""
    groups, roles = [], []
    for member in mix:
        engine, name = member.shape.parameters, f"{member.shape.name}-{member.role}"
        limits = f"max_model_len={engine.max_model_len}, blocks_total={engine.blocks_total}, prefix_caching=false"
        groups.append(
            f'{{name="{name}", instances={member.count}, step_time="{sets[member.shape.name]}", engine={{{limits}}}}}'
        )
        roles.append(f'"{name}"="{member.role}"')
    slo = f"slo={{ttft_ms={load.targets.ttft_s * 1e3}, tpot_ms={load.targets.tpot_s * 1e3}}}"
    settings = [f"cluster.groups=[{', '.join(groups)}]", f"migration.roles={{{', '.join(roles)}}}", slo]
    settings += [f"seed={seed}", "roles.policy=fixed", "roles.parameters={}", "workload.phases=[]"]
    settings += [f"workload.count={count}", f"workload.warm_up={count // 5}"]
    settings += [f'workload.arrivals={{kind="poisson", rate_per_s={load.rate_per_s}}}']
    settings += [f'workload.lengths={{kind="fitted", name="{load.lengths}", total_max={LENGTH_MAX - 1}}}']
    return scenario("roles", [*settings, f"migration.bandwidth_gbps={GBPS}"])


def run_one(key: str, spec: ScenarioSpec) -> AssignedRow:
    """Makes one run."""
    summary = summarise(run_scenario(spec, step_times=load_step_time))
    return AssignedRow(
        key=key,
        within=summary.goodput,
        ttft_s=summary.ttft_s.mean,
        tpot_s=summary.tpot_s.mean,
        e2e_s=summary.e2e_s.mean,
        lost=summary.lost,
        served=summary.served,
    )


class AssignmentFigure:
    """Compares the planner's choice with what whole clusters do, for some loads."""

    def __init__(self, sets: Mapping[str, str], mixes: Mapping[str, Sequence[MixMember]], rows: Path | None) -> None:
        self._sets = sets
        self._mixes = mixes
        self._path = rows
        lines = rows.read_bytes().splitlines() if rows is not None and rows.exists() else []
        self._rows = {row.key: row for row in (msgspec.json.decode(line, type=AssignedRow) for line in lines)}

    def show(self, load: AssignmentLoad, *, count: int, seeds: int) -> bool:
        """Prints a table of one load; returns whether the choice is right and nothing was lost.

        Right: no other mix serves more requests within the objectives, by more than two points, and none that serves
        as many has a mean end-to-end time shorter by more than 10 %.
        """
        ratings = planned(load, self._mixes, count)
        chosen = min(ratings, key=lambda name: (-ratings[name].within, ratings[name].e2e_s))
        found = {name: [self._row(load, name, count, seed) for seed in range(seeds)] for name in self._mixes}
        heads = ["", "planner: within %", "e2e s", "cluster: within %", "TTFT s", "TPOT ms", "e2e s", "lost"]
        lines = []
        for name, rows in found.items():
            plan = ratings[name]
            cells = [f"{100 * plan.within:.1f}", f"{plan.e2e_s:.2f}", figure([100 * r.within for r in rows], places=1)]
            cells += [figure([r.ttft_s for r in rows]), figure([1e3 * r.tpot_s for r in rows], places=1)]
            cells += [figure([r.e2e_s for r in rows]), str(sum(r.lost for r in rows))]
            lines.append([("> " if name == chosen else "  ") + name, *cells])
        objectives = f"TTFT {load.targets.ttft_s:g} s, TPOT {load.targets.tpot_s:g} s"
        print(f"\n{load.name}: {load.lengths}, {load.rate_per_s:g}/s; {objectives}")
        print(table(heads, lines))
        right = self._is_right(found, chosen)
        print(f"chosen: {chosen}; {'right' if right else 'WRONG'}")
        return right and not any(row.lost for rows in found.values() for row in rows)

    def _is_right(self, found: Mapping[str, Sequence[AssignedRow]], chosen: str) -> bool:
        means = {n: (_mean([r.within for r in rows]), _mean([r.e2e_s for r in rows])) for n, rows in found.items()}
        within, e2e_s = means[chosen]
        return not any(
            other > within + 0.02 or (other >= within and other_s < 0.9 * e2e_s) for other, other_s in means.values()
        )

    def _row(self, load: AssignmentLoad, name: str, count: int, seed: int) -> AssignedRow:
        key = f"{load.name}/{load.rate_per_s:g}/{name}/{seed}/{count}"
        if key not in self._rows:
            row = run_one(key, spec_of(load, self._mixes[name], self._sets, count=count, seed=seed))
            self._rows[key] = row
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(msgspec.json.encode(row) + b"\n")
        return self._rows[key]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of both figures."""
    parser.add_argument("--requests", type=int, default=250, help="per run, and of the planner (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of the runs (default %(default)s)")
    parser.add_argument("--rows", type=Path, help="keep each run's figures here, JSON lines, and make no run twice")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
