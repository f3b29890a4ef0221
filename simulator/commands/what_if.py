"""Replays what a cluster was asked in the last hour: first as it was, to show how right a replay is, then with changes.

    millrace what-if --set policies.dispatch.name=join_shortest_queue     # the last hour with another rule
    millrace what-if --set worker.max_num_seqs=8 --instances 3            # two questions
    millrace what-if --rate x1.5 --goal 'ttft_p99<1s'                     # fewest instances for half as much again
    millrace what-if --rate max --goal 'ttft_p99<1s'                      # the highest rate
    millrace what-if --advise                                             # is any other setting better?

Each --set, --instances and --cluster is a question of its own; `--set 'KEY=VALUE KEY=VALUE'` changes several keys at
once. Keys are those of `millrace up --set`. docs/WHAT_IF.md explains the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from millrace.actor.errors import ConfigError
from millrace.cli import recording as recordings
from millrace.cli.errors import CliError, UsageError
from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from simulator.commands.sim import wide_console

if TYPE_CHECKING:
    from millrace.cluster.spec import ClusterSpec
    from millrace.policies.objectives import Objectives
    from millrace.workloads.recording import RecordedLoad

    from simulator.scenarios.shown_run import ShownRun
    from simulator.whatif.answering import Asked, ChangeAnswer
    from simulator.whatif.changes import AskedChange
    from simulator.whatif.figures import ComparedFigure

_COLUMNS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50", "e2e_p99")

#: Tables that fit into 80 columns.
_NARROW: Any = {"title_justify": "left", "box": HORIZONTALS, "padding": (0, 1, 0, 0), "pad_edge": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    recordings.add_source(parser)
    group = parser.add_argument_group("changes, each a question of its own")
    add = group.add_argument
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="as `millrace up` takes it")
    add("--instances", action="append", default=[], type=int, metavar="N", help="so many instances")
    add("--cluster", action="append", default=[], type=Path, metavar="FILE", help="another cluster's file")
    add = parser.add_argument
    add("--rate", default="x1", metavar="xF", help="so many times the recorded rate; max with --goal: search for it")
    add("--advise", action="store_true", help="try a handful of settings, and say whether one is better in all")
    add("--goal", metavar="FIGURE<BOUND", help="search for the fewest instances, such as ttft_p99<1s")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    add("--most", type=int, default=0, metavar="N", help="only the last N requests")
    add("--output", type=Path, metavar="FILE", help="write all figures, JSON")
    page = "show the recording and its replays side by side in the browser, at this port (default: 8001)"
    add("--page", type=int, nargs="?", const=8001, metavar="PORT", help=page)


def run(arguments: argparse.Namespace) -> int:
    """Replays and prints."""
    from millrace.sim.failure import SimulationFailed
    from millrace.workloads.shape import WorkloadError

    from simulator.policy_faults import PolicyFailed
    from simulator.scenarios.reading import ScenarioError

    if arguments.rate == "max" and not arguments.goal:
        raise UsageError("--rate max needs a --goal")
    try:
        return _answer(arguments)
    except (ScenarioError, WorkloadError, ConfigError, OSError, PolicyFailed) as error:
        raise CliError(str(error)) from None
    except SimulationFailed as error:
        raise CliError(f"the simulation failed, which is a bug: {error}") from None


def _answer(arguments: argparse.Namespace) -> int:
    import msgspec

    from simulator.whatif.advising import advice, candidates, report
    from simulator.whatif.answering import answers, asked, parse_goal

    goal, speed = parse_goal(arguments.goal) if arguments.goal else None, _speed(arguments.rate)
    load = recordings.recording_of(arguments, requests_max=arguments.most, latest=True)
    cluster, clusters = _cluster(load, arguments.cluster)
    changes = _changes(cluster, arguments, clusters)
    console = wide_console()
    pages: list[ShownRun] = []
    show = partial(_shown, pages) if arguments.page is not None else None
    with TemporaryDirectory() as folder:
        with console.status("replaying the cluster as it was"):
            question = asked(load, cluster, Path(folder), show)
        console.print("\n".join(recordings.shown(load)), highlight=False)
        _print_fidelity(console, question)
        tried = candidates(cluster, question.objectives) if arguments.advise else []
        changes += tried
        with console.status(f"replaying {len(changes)} changes"):
            found = list(answers(question, changes, speed=speed, jobs=arguments.jobs, show=show))
        if goal is not None:
            found += _search(console, question, arguments, speed)
        if found:
            console.print(_changes_table(found, question.objectives, wide=console.width >= 100))
            for each in found:
                _print_answer(console, each)
        advised = advice(question, found[-len(tried) :]) if tried else None
        if advised is not None:
            console.print(f"advice: {advised.settings or 'none'}: {advised.evidence}", highlight=False, markup=False)
        if arguments.output is not None:
            document = {**report(question, found, advised), "cpu_s": time.process_time()}
            arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    if pages:
        _serve(load, pages, arguments.page, console)
    return 0


def _shown(pages: list[ShownRun], name: str) -> ShownRun:
    from simulator.scenarios.shown_run import ShownRun

    pages.append(ShownRun(name))
    return pages[-1]


def _serve(load: RecordedLoad, pages: list[ShownRun], port: int, console: Console) -> None:
    from simulator.scenarios.shown_run import serve
    from simulator.whatif.recorded_run import recorded_run

    runs = [recorded_run(load), *(each.page for each in pages)]
    asyncio.run(serve(runs, port, partial(console.print, highlight=False)))


def _speed(text: str) -> float:
    """Raises UsageError for what is no factor."""
    if text == "max":
        return 1.0
    try:
        speed = float(text.removeprefix("x"))
    except ValueError:
        speed = 0.0
    if not 0 < speed <= 1000:
        raise UsageError(f"--rate {text}: must be like x1.5, or max")
    return speed


def _cluster(load: RecordedLoad, files: list[Path]) -> tuple[ClusterSpec, list[Path]]:
    """The cluster that the load ran on, and files to compare with it: the first one is it where nothing is recorded.

    Raises:
        CliError: nobody says what the cluster is.
    """
    from millrace.cluster.model_folders import with_model_folders
    from millrace.cluster.reading import read_cluster

    from simulator.whatif.changes import recorded_cluster

    if load.began.cluster:
        return recorded_cluster(load), files
    if not files:
        raise CliError("the recording does not know its cluster, as imported ones do not; name one with --cluster FILE")
    return with_model_folders(read_cluster(files[0])), files[1:]


def _changes(cluster: ClusterSpec, arguments: argparse.Namespace, clusters: list[Path]) -> list[AskedChange]:
    from simulator.whatif.changes import with_file, with_instances, with_setting

    return [
        *(with_setting(cluster, text) for text in arguments.set),
        *(with_instances(cluster, count) for count in arguments.instances),
        *(with_file(path) for path in clusters),
    ]


def _search(console: Console, question: Asked, arguments: argparse.Namespace, speed: float) -> list[ChangeAnswer]:
    """Searches, with each try on the terminal."""
    from simulator.whatif.answering import fewest_instances, highest_rate, parse_goal

    goal = parse_goal(arguments.goal)
    with console.status(f"searching: {arguments.goal}") as status:

        def tell(tried: str, held: bool) -> None:
            status.update(f"searching: {arguments.goal}; {tried} {'keeps it' if held else 'does not'}")

        if arguments.rate == "max":
            rate = highest_rate(question, goal, tell)
            console.print(f"{arguments.goal}: up to {rate:.2f} times the recorded rate", highlight=False)
            return []
        answer = fewest_instances(question, goal, speed, tell)
    if answer is None:
        console.print(f"{arguments.goal}: no number of instances keeps it", highlight=False)
        return []
    console.print(f"{arguments.goal}: {answer.label} keep it, fewer do not", highlight=False)
    return [answer]


def _print_fidelity(console: Console, question: Asked) -> None:
    if not question.fidelity:
        console.print("nothing recorded tells how long requests took: answers cannot be compared with it")
        return
    table = Table(title="as it was, second half: recorded and replayed, ms", **_NARROW)
    table.add_column("")
    for name in _COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    figures = question.fidelity
    table.add_row("recorded", *(recordings.digits(figures[name].before) for name in _COLUMNS))
    table.add_row("replayed", *(recordings.digits(figures[name].after) for name in _COLUMNS))
    table.add_row("ratio", *(f"{figures[name].ratio:.2f}" for name in _COLUMNS))
    table.add_row("95 %", *(f"{figures[name].low:.2f} to {figures[name].high:.2f}" for name in _COLUMNS))
    console.print(table)


def _changes_table(found: list[ChangeAnswer], objectives: Objectives, *, wide: bool) -> Table:
    caption = f"""intervals of 95 % by a bootstrap over slices of the recording's time
within: {objectives}, {objectives.source}"""
    table = Table(title="what if, ms", caption=caption, caption_justify="left", show_lines=True, **_NARROW)
    table.add_column("", overflow="fold", width=None if wide else 15)
    for name in (*_COLUMNS, "within"):
        table.add_column(name.replace("_", " "), justify="right")
    before = found[0].within.before
    now = found[0].figures
    table.add_row("unchanged", *(recordings.digits(now[name].before) for name in _COLUMNS), f"{before:.1%}")
    for each in found:
        within = each.within
        points = f"{within.after:.1%}\n[{100 * within.low:+.1f}, {100 * within.high:+.1f}]"
        table.add_row(each.label, *(_cell(each.figures[name]) for name in _COLUMNS), points)
    return table


def _cell(figure: ComparedFigure) -> str:
    low, high = (f"{100 * (bound - 1):+.0f}" for bound in (figure.low, figure.high))
    return f"{recordings.digits(figure.after)}\n{100 * (figure.ratio - 1):+.0f} %\n[{low}, {high}]"


def _print_answer(console: Console, answer: ChangeAnswer) -> None:
    console.print(f"{answer.label}: {answer.reason}", highlight=False)
    if answer.fragment:
        settings = (f"--set {shlex.quote(line)}" for line in answer.fragment.splitlines())
        console.print(f"  millrace apply {' '.join(settings)}", highlight=False, markup=False, soft_wrap=True)
