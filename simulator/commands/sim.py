"""Runs whole clusters in virtual time: scenarios from files, or random load and faults.

With --scenario: the cluster, workload and policy of a TOML file (examples/scenarios, docs/SIMULATION.md); prints the
results, and writes them with plots into the folder of --output or of the file. --set changes a value, --sweep runs
every combination of values:

    millrace sim --scenario examples/scenarios/mixed.toml --set workload.count=2000
    millrace sim --scenario FILE --sweep dispatch.policy=random,forecast --sweep workload.arrivals.rate_per_s=24,28

Without it, each seed builds ingresses, workers with modelled engines, coordinators, taggers and clients, injects
faults, lets the cluster recover, and checks that every request had one outcome, every token was right and in order, and
no state was left behind. The same seed gives the same run on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from functools import partial
from pathlib import Path

from millrace.cli.errors import CliError, UsageError
from millrace.enginemodel.coefficients import load_step_time
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from simulator.soak import seeds as soak

#: Characters of a line where no terminal says how many there are.
COLUMNS = 140

#: Seeds of random load and faults by default.
SEEDS = 20

#: Options of one kind of run only; of random ones with what says the same in a scenario.
_ONLY_SCENARIO = ("set", "sweep", "output", "page")
_ONLY_RANDOM = {
    "policy": "--set dispatch.policy=NAME",
    "first": "--set seed=N",
    "migrations": "--set migration.on=true",
    "verbose": "--output FOLDER, which writes what became of each request",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    group = parser.add_argument_group("a scenario from a file")
    group.add_argument("--scenario", type=Path, metavar="FILE", help="the scenario (docs/SIMULATION.md)")
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of it; may be repeated"
    )
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V,V",
        help="run it with every value; may be repeated, for every combination",
    )
    group.add_argument("--output", type=Path, metavar="FOLDER", help="write results and pictures there")
    group.add_argument(
        "--page",
        type=int,
        nargs="?",
        const=8001,
        metavar="PORT",
        help="watch the run in the browser, and do harm to it; of a sweep compare the runs afterwards (default: 8001)",
    )
    soak.add_arguments(parser, seeds=SEEDS)
    # None where it was not given: what a scenario would ignore is refused by its name.
    parser.set_defaults(seeds=None, first=None, policy=None, jobs=None)


def run(arguments: argparse.Namespace) -> int:
    """Runs the scenario, or the seeds."""
    _refuse_ignored(arguments)
    arguments.jobs = processes(arguments.jobs, scenario=arguments.scenario is not None)
    if arguments.scenario is None:
        arguments.seeds = arguments.seeds or SEEDS
        arguments.first = arguments.first or 0
        arguments.policy = arguments.policy or soak.POLICY
        return soak.run(arguments)
    from millrace.sim.failure import SimulationFailed
    from millrace.workloads.shape import WorkloadError

    from simulator.policy_faults import PolicyFailed
    from simulator.scenarios.reading import ScenarioError

    try:
        return _run_sweep(arguments) if arguments.sweep or (arguments.seeds or 1) > 1 else _run_once(arguments)
    except (ScenarioError, WorkloadError, OSError, ValueError) as error:
        raise CliError(str(error)) from None
    except PolicyFailed as error:
        raise CliError(str(error)) from None
    except SimulationFailed as error:
        raise CliError(f"the simulation failed, which is a bug: {error}") from None


def processes(jobs: int | None, *, scenario: bool) -> int:
    """Processes that run seeds or variants: as many as asked for, else all cores for a scenario and 1 for a soak."""
    return jobs or (scenario and os.cpu_count()) or 1


def _refuse_ignored(arguments: argparse.Namespace) -> None:
    """Raises UsageError for what was given and would do nothing."""
    if arguments.seeds is not None and arguments.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, is {arguments.seeds}.")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, is {arguments.jobs}.")
    if arguments.scenario is None:
        for option in _ONLY_SCENARIO:
            if getattr(arguments, option):
                raise UsageError(f"--{option} is for scenarios: name one with --scenario FILE.")
        return
    for option, instead in _ONLY_RANDOM.items():
        given = getattr(arguments, option)
        if given is not None and given is not False:
            raise UsageError(f"--{option} is for random load and faults: with --scenario say {instead}.")


def folders_of(scenario: Path) -> tuple[Path, ...]:
    """Return the folders that may hold a scenario's traces: the environment's data folder, and the scenario's own."""
    return Path(os.environ.get("MILLRACE_DATA", "../shared/data")), scenario.parent


def wide_console() -> Console:
    """The terminal; where there is none (a pipe, a file) wide enough for every table."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=COLUMNS)


def progress_bar(console: Console) -> Progress:
    """A bar with counts and times."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


def _run_once(arguments: argparse.Namespace) -> int:
    from simulator.scenarios.plots import draw_run
    from simulator.scenarios.reading import read_scenario
    from simulator.scenarios.running import run_scenario
    from simulator.scenarios.saving import save
    from simulator.scenarios.shown_run import WatchedRun
    from simulator.scenarios.statistics import summarise
    from simulator.scenarios.tables import run_tables

    spec = read_scenario(arguments.scenario, arguments.set)
    console = wide_console()
    say = partial(console.print, highlight=False, markup=False)
    shown = None if arguments.page is None else WatchedRun(spec.name, arguments.page, say)
    with progress_bar(console) as bar:
        task = bar.add_task(f"{spec.name}, seed {spec.seed}", total=spec.workload.count)
        outcome = run_scenario(
            spec,
            step_times=load_step_time,
            folders=folders_of(arguments.scenario),
            progress=lambda ended, virtual_s: bar.update(task, completed=ended),
            clock=time.perf_counter,
            shown=shown,
        )
    summary = summarise(outcome)
    console.print(run_tables(outcome, summary))
    for kind, detail in outcome.details.items():
        console.print(f"{kind}: {detail}", highlight=False)
    folder = _folder(arguments.output, spec.output.folder)
    if folder is not None:
        save(outcome, summary, folder)
        drawn = draw_run(outcome, folder) if spec.output.plots else []
        console.print(f"written to {folder}: results and {len(drawn)} pictures", highlight=False)
    if shown is not None:
        shown.serve()
    return 0


def _run_sweep(arguments: argparse.Namespace) -> int:
    import msgspec

    from simulator.scenarios.plots import draw_sweep
    from simulator.scenarios.shown_run import ShownRun, serve
    from simulator.scenarios.sweeping import RunInputs, run_all, run_one, variants
    from simulator.scenarios.tables import sweep_table

    wanted = variants(arguments.scenario, arguments.set, arguments.sweep, arguments.seeds or 1)
    shown = [] if arguments.page is None else [ShownRun(f"{each.label}, seed {each.spec.seed}") for each in wanted]
    surroundings = RunInputs(step_times=load_step_time, folders=folders_of(arguments.scenario), clock=time.perf_counter)
    console = wide_console()
    summaries = []
    with progress_bar(console) as bar:
        task = bar.add_task(f"{len(wanted)} runs", total=len(wanted))
        one_by_one = (run_one((variant, surroundings), page) for variant, page in zip(wanted, shown, strict=False))
        for summary in one_by_one if shown else run_all(wanted, surroundings, jobs=arguments.jobs):
            summaries.append(summary)
            bar.advance(task)
    console.print(sweep_table(summaries))
    spec = wanted[0].spec
    folder = _folder(arguments.output, spec.output.folder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sweep.json").write_bytes(msgspec.json.format(msgspec.json.encode(summaries)) + b"\n")
        if spec.output.plots:
            draw_sweep(summaries, folder, slo_ttft_s=spec.slo.ttft_ms / 1000)
        console.print(f"written to {folder}", highlight=False)
    if shown:
        asyncio.run(serve([each.page for each in shown], arguments.page, partial(console.print, highlight=False)))
    return 0


def _folder(given: Path | None, named: str) -> Path | None:
    return given if given is not None else Path(named) if named else None
