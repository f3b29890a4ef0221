"""Searches for the highest arrival rate at which a scenario meets an SLO, with several seeds and a confidence interval.

    millrace capacity --scenario examples/scenarios/mixed.toml --slo 'ttft.p99<3' --low 20 --high 40 --seeds 3
    millrace capacity --scenario FILE --sweep dispatch.policy=join_shortest_queue,forecast

Each seed is a bisection of its own; they run on all cores. --sweep does it for every value.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

from millrace.cli.errors import CliError
from millrace.enginemodel.coefficients import load_step_time
from rich.table import Table

from simulator.commands.sim import folders_of, progress_bar, wide_console

#: Pause between two looks whether a search has got further, seconds.
LOOK_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    parser.add_argument("--scenario", type=Path, required=True, metavar="FILE", help="the scenario, TOML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of it")
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=V,V", help="search for every value")
    parser.add_argument("--slo", default="ttft.p99<3", help="what must hold, seconds (default %(default)s)")
    parser.add_argument("--low", type=float, default=1.0, help="rate to begin with that may hold, requests/s")
    parser.add_argument("--high", type=float, default=100.0, help="rate to begin with that may not hold")
    parser.add_argument("--tolerance", type=float, default=0.2, help="width of the last bracket, requests/s")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there, JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the search."""
    from millrace.sim.failure import SimulationFailed
    from millrace.workloads.shape import WorkloadError

    from simulator.policy_faults import PolicyFailed
    from simulator.scenarios.reading import ScenarioError

    if not 0 < arguments.low < arguments.high or arguments.tolerance <= 0 or arguments.seeds < 1:
        raise CliError("--low must be above 0 and below --high, --tolerance above 0, --seeds at least 1.")
    try:
        return _search(arguments)
    except (ScenarioError, WorkloadError, OSError, ValueError) as error:
        raise CliError(str(error)) from None
    except PolicyFailed as error:
        raise CliError(str(error)) from None
    except SimulationFailed as error:
        raise CliError(f"the simulation failed, which is a bug: {error}") from None


def _search(arguments: argparse.Namespace) -> int:
    import msgspec

    from simulator.scenarios import capacity
    from simulator.scenarios.sweeping import RunInputs, variants

    target = capacity.parse_target(arguments.slo)
    search = capacity.Search(low=arguments.low, high=arguments.high, tolerance=arguments.tolerance)
    wanted = variants(arguments.scenario, arguments.set, arguments.sweep, arguments.seeds)
    for variant in wanted:
        capacity.at_rate(variant.spec, arguments.low)
    surroundings = RunInputs(step_times=load_step_time, folders=folders_of(arguments.scenario))
    work = [(variant, surroundings, target, search) for variant in wanted]
    console = wide_console()
    with progress_bar(console) as bar:
        tasks = {
            (each.label, each.spec.seed): bar.add_task(f"{each.label}, seed {each.spec.seed}", total=None)
            for each in wanted
        }

        def show(tried: capacity.Tried) -> None:
            text = f"{tried.label}, seed {tried.seed}: {tried.low:.1f}/s, below {tried.high:.1f}/s"
            task = tasks[tried.label, tried.seed]
            bar.update(task, description=text, completed=tried.count, total=tried.count + tried.left)

        found = _found(work, arguments.jobs, show)
    intervals = capacity.intervals(found)
    console.print(_table(intervals, found, arguments.slo))
    if arguments.output is not None:
        document = {"slo": arguments.slo, "capacity": intervals, "searches": found}
        arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    return 0


def _found(work: list[Any], jobs: int, show: Callable[[Any], None]) -> list[Any]:
    """Every search's result, in their order.

    Args:
        show: Called after each rate that any of them tried.
    """
    from simulator.scenarios.capacity import find

    if jobs <= 1 or len(work) == 1:
        return [find(each, show) for each in work]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(min(jobs, len(work))) as pool:
        progress = manager.Queue()
        results = pool.map_async(partial(find, tell=progress.put), work, chunksize=1)
        while not results.ready() or not progress.empty():
            with suppress(Empty):
                show(progress.get(timeout=LOOK_S))
        return results.get()


def _table(intervals: list[Any], found: list[Any], slo: str) -> Table:
    table = Table(title=f"capacity under {slo}", title_justify="left")
    for index, column in enumerate(("scenario", "requests/s", "95 %", "by seed", "runs")):
        table.add_column(column, justify="left" if index == 0 else "right")
    for interval in intervals:
        own = [one for one in found if one.label == interval.label]
        table.add_row(
            interval.label,
            f"{interval.mean:.2f}",
            "" if interval.seeds < 2 else f"±{interval.half_width:.2f}",
            ", ".join(f"{one.rate_per_s:.2f}" for one in own),
            str(sum(len(one.tried) for one in own)),
        )
    return table
