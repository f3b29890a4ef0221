"""Makespan of a drifting mix of prefill and decode: static splits, all instances doing both, and roles that flip.

    python -m bench flowkv_roles

`examples/scenarios/roles.toml`: Mooncake's conversations at eight times their speed on four modelled H200. Prompts are
long in the first half of the requests, answers in the second. Each seed takes the next rows of the trace. ``--phase``
takes one of the halves for all requests; ``--steady`` a light load without a drift, at half the speed of the trace, in
which nobody should be flipped: 3,000 requests are half an hour. `brokers`: running requests move by `delay` as
well, the rung below a flip. `decode first` and `prefill first`: all do both, with steps of at most 512 and 32,768
tokens, fixed. `bounded steps`: all do both, and bounds on steps that change with the load.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from millrace.contracts.plan import InstanceRole
from millrace.enginemodel.coefficients import load_step_time
from millrace.sim.checkers.roles import CapableRoles

from bench.scenarios.scenarios import data_folder, scenario
from bench.scenarios.tables import figure, table
from papers import PAPERS
from simulator.scenarios.running import run_scenario
from simulator.scenarios.spec import ScenarioSpec
from simulator.scenarios.statistics import summarise

#: Token budgets of a step by label; the others have the scenario's, 8,192.
BUDGETS = {"all both, decode first": 512, "all both, prefill first": 32_768}

#: The paper's policy.
FLOWKV = str(PAPERS / "flowkv" / "roles.py")

#: Layouts: how many of the four prefill (the others decode), or None where all do both; the policy; brokers or none.
LAYOUTS: dict[str, tuple[int | None, str, bool]] = {
    "1 prefill, 3 decode": (1, "fixed", False),
    "2 prefill, 2 decode": (2, "fixed", False),
    "3 prefill, 1 decode": (3, "fixed", False),
    "all both": (None, "fixed", False),
    "all both, brokers": (None, "fixed", True),
    "all both, decode first": (None, "fixed", False),
    "all both, prefill first": (None, "fixed", False),
    "flowkv, from 2 and 2": (2, FLOWKV, False),
    "flowkv, brokers": (2, FLOWKV, True),
    "bounded steps": (None, "fixed", False),
    "bounded steps, brokers": (None, "fixed", True),
}

#: Further settings by label.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "bounded steps": ("step_bounds={tpot_s = 0.025, ttft_s = 5.0}",),
    "bounded steps, brokers": ("step_bounds={tpot_s = 0.025, ttft_s = 5.0}",),
}
STATIC = tuple(label for label, (prefills, policy, _) in LAYOUTS.items() if prefills and policy == "fixed")
BROKERS = (
    "trading.policy=delay",
    'trading.reasons=["drain", "handoff", "memory", "balance"]',
)
INSTANCES = tuple(f"h200-{index}" for index in range(4))
STEADY_SPEED = 0.5
PHASES = {"prompts": "[{output_scale=0.25}]", "answers": "[{prompt_scale=0.1, output_scale=4.0}]"}


class RoleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in seconds; ``key`` tells runs apart."""

    key: str
    label: str
    seed: int
    makespan: float
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    e2e_mean: float
    goodput: float
    preemptions: int
    lost: int
    flips: int


def main() -> int:
    """Runs every layout with every seed and prints a table; fails where a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="per run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="parts of the trace (default %(default)s)")
    parser.add_argument("--phase", choices=sorted(PHASES), help="one half for all requests; default: the drift")
    parser.add_argument("--steady", action="store_true", help="a light load without a drift")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--rows", type=Path, help="keep each run's figures here, JSON lines, and make no run twice")
    arguments = parser.parse_args()
    found = _rows(arguments.rows)
    rows = []
    for seed in range(arguments.seeds):
        for label in arguments.layouts:
            spec = spec_of(label, seed, arguments)
            key = f"{label}/{seed}/{arguments.requests}/{arguments.phase}/{arguments.steady}"
            row = found.get(key) or run_one(key, label, spec)
            if key not in found and arguments.rows is not None:
                with arguments.rows.open("ab") as file:
                    file.write(msgspec.json.encode(row) + b"\n")
            rows.append(row)
    print(f"{arguments.requests:,} requests a run, {arguments.seeds} parts of the trace, ± a 95 % t-interval over them")
    print(_table(rows))
    if set(STATIC) <= set(arguments.layouts):
        print(_verdict(rows))
    return int(any(row.lost for row in rows))


def spec_of(label: str, seed: int, arguments: argparse.Namespace) -> ScenarioSpec:
    """The scenario of a layout and a seed."""
    prefills, policy, brokers = LAYOUTS[label]
    settings = [f"seed={seed}", f"roles.policy={policy}", f"workload.count={arguments.requests}"]
    settings += [f"workload.lengths.skip={seed * arguments.requests}"]
    settings += PARAMETERS.get(label, ())
    settings += BROKERS if brokers else ()
    settings += [f"cluster.groups.0.engine.token_budget={BUDGETS[label]}"] if label in BUDGETS else []
    if arguments.steady:
        settings += ["workload.phases=[]", f"workload.arrivals.speed={STEADY_SPEED}"]
    elif arguments.phase:
        settings.append(f"workload.phases={PHASES[arguments.phase]}")
    return placed(scenario("roles", settings), prefills)


def placed(spec: ScenarioSpec, prefills: int | None) -> ScenarioSpec:
    """The scenario with so many instances that prefill and the others that decode; None where all do both."""
    roles = {} if prefills is None else _split(prefills)
    return msgspec.structs.replace(spec, migration=msgspec.structs.replace(spec.migration, roles=roles))


def _split(prefills: int) -> dict[str, InstanceRole]:
    return {
        name: InstanceRole.PREFILL if index < prefills else InstanceRole.DECODE for index, name in enumerate(INSTANCES)
    }


def run_one(key: str, label: str, spec: ScenarioSpec) -> RoleRow:
    """Makes one run; every plan is checked."""
    checker = CapableRoles(gap_ns=10_000_000_000)
    outcome = run_scenario(spec, step_times=load_step_time, folders=(data_folder(),), checkers=(checker,))
    summary = summarise(outcome)
    ends = [record.arrival_ns + record.e2e_ns for record in outcome.finished]
    return RoleRow(
        key=key,
        label=label,
        seed=spec.seed,
        makespan=max(ends) / 1e9,
        ttft_mean=summary.ttft_s.mean,
        ttft_p99=summary.ttft_s.p99,
        tpot_mean=summary.tpot_s.mean,
        e2e_mean=summary.e2e_s.mean,
        goodput=summary.goodput,
        preemptions=summary.preemptions,
        lost=summary.lost,
        flips=len(checker.flips),
    )


def _rows(path: Path | None) -> dict[str, RoleRow]:
    if path is None or not path.exists():
        return {}
    rows = [msgspec.json.decode(line, type=RoleRow) for line in path.read_bytes().splitlines()]
    return {row.key: row for row in rows}


def _table(rows: Sequence[RoleRow]) -> str:
    heads = ["", "makespan s", "TTFT mean s", "TTFT p99 s", "TPOT mean ms", "e2e mean s", "within SLO %", "hops"]
    lines = []
    for label in dict.fromkeys(row.label for row in rows):
        own = [row for row in rows if row.label == label]
        cells = [
            figure([row.makespan for row in own], places=1),
            figure([row.ttft_mean for row in own], places=2),
            figure([row.ttft_p99 for row in own], places=1),
            figure([row.tpot_mean * 1e3 for row in own], places=1),
            figure([row.e2e_mean for row in own], places=2),
            figure([row.goodput * 100 for row in own], places=1),
            figure([float(row.flips) for row in own], places=1),
        ]
        lines.append([label, *cells])
    return table(heads, lines)


def _verdict(rows: Sequence[RoleRow]) -> str:
    """Makespan of each other layout over that of the best static split of the same part of the trace."""
    told = []
    spans = {(row.label, row.seed): row.makespan for row in rows}
    seeds = sorted({row.seed for row in rows})
    best = {seed: min(spans[label, seed] for label in STATIC) for seed in seeds}
    for label in dict.fromkeys(row.label for row in rows if row.label not in STATIC):
        shares = [spans[label, seed] / best[seed] for seed in seeds]
        wins = sum(share <= 1 for share in shares)
        share = figure(shares, places=3)
        told.append(f"{label}: {share} of the best static split's makespan, {wins} of {len(seeds)} not longer")
    return "\n".join(told)


if __name__ == "__main__":
    raise SystemExit(main())
