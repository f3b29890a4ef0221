"""Makes many runs, on some processes, with a line of progress."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import msgspec
from millrace.enginemodel.coefficients import load_step_time

from bench.scenarios.rows import Measure, Row, Store, no_figures, row_of
from bench.scenarios.scenarios import data_folder
from simulator.scenarios.running import run_scenario
from simulator.scenarios.spec import ScenarioSpec

#: Exit status where --stop-after ended a figure before all its runs were made.
OUT_OF_TIME = 75


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is wanted. ``spec`` has its rate and seed in it; ``measure`` gives the row's further figures."""

    label: str
    rate: float
    spec: ScenarioSpec
    measure: Measure = no_figures


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line options that every figure of this package takes."""

    requests: int
    seeds: int
    cores: int
    store: Store
    #: Seconds of this process's clock after which no run is begun.
    until_s: float = math.inf

    @property
    def told(self) -> str:
        """Statement about its runs that every table makes."""
        seeds = f"seeds 0 to {self.seeds - 1}, ± a 95 % t-interval over them" if self.seeds > 1 else "seed 0 alone"
        return f"{self.requests:,} requests a run, {seeds}"

    def variations(self, label: str, rate: float, spec: ScenarioSpec, measure: Measure = no_figures) -> list[Job]:
        """One job for each seed."""
        seeds = range(spec.seed, spec.seed + self.seeds)
        specs = [msgspec.structs.replace(spec, seed=seed) for seed in seeds]
        return [Job(label=label, rate=rate, spec=each, measure=measure) for each in specs]


def add_options(parser: argparse.ArgumentParser, *, requests: int, seeds: int) -> None:
    """The arguments that make an Options; the defaults are those of the published figure."""
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--requests", type=int, default=requests, help="per run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=seeds, help="runs with different arrivals (default %(default)s)")
    parser.add_argument("--cores", type=int, default=cores, help="processes (default: all, %(default)s here)")
    parser.add_argument("--rows", type=Path, help="keep each run's figures here, JSON lines, and make no run twice")
    told = f"s; begin no run later, exit with {OUT_OF_TIME}: the same command with the same --rows goes on"
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="S", help=told)


def options(arguments: argparse.Namespace) -> Options:
    """From what was parsed. Raises SystemExit where runs would be cut off and not kept."""
    if arguments.stop_after < math.inf and arguments.rows is None:
        raise SystemExit("bench: --stop-after needs --rows, or what was run is lost")
    return Options(
        requests=arguments.requests,
        seeds=arguments.seeds,
        cores=arguments.cores,
        store=Store(arguments.rows),
        until_s=perf_counter() + arguments.stop_after,
    )


def run_all(jobs: Sequence[Job], chosen: Options) -> list[Row]:
    """The rows of some jobs, in their order; those in the store are taken from there, under the job's label.

    Raises:
        SystemExit: with OUT_OF_TIME, time is up and runs are missing; what was made is in the store.
    """
    missing = [job for job in jobs if chosen.store.get(job.spec) is None]
    for row in _run(missing, chosen):
        chosen.store.put(row)
    found = ((job, chosen.store.get(job.spec)) for job in jobs)
    return [msgspec.structs.replace(row, label=job.label, rate=job.rate) for job, row in found if row is not None]


def _run(jobs: Sequence[Job], chosen: Options) -> Iterator[Row]:
    began_s, done = perf_counter(), 0
    portion = max(1, chosen.cores if chosen.until_s < math.inf else len(jobs))
    for some in (jobs[at : at + portion] for at in range(0, len(jobs), portion)):
        if perf_counter() >= chosen.until_s:
            print(f"bench: time is up, {len(jobs) - done} runs of this table are missing", file=sys.stderr)
            raise SystemExit(OUT_OF_TIME)
        for row in _rows(some, chosen.cores):
            done += 1
            _tell(row, f"{done}/{len(jobs)} runs, {perf_counter() - began_s:.0f} s")
            yield row


def _tell(row: Row, progress: str) -> None:
    if row.lost:
        print(f"bench: {row.label} at {row.rate:g}/s lost {row.lost} requests", file=sys.stderr)
    print(
        f"  {progress}; last: {row.label} at {row.rate:g}/s, seed {row.seed}, TTFT p99 {row.ttft_p99:.2f} s, "
        f"{row.wall_s:.0f} s",
        file=sys.stderr,
    )


def _rows(jobs: Sequence[Job], cores: int) -> Iterator[Row]:
    if cores <= 1 or len(jobs) <= 1:
        yield from map(run_one, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(min(cores, len(jobs))) as pool:
        yield from pool.imap_unordered(run_one, jobs)


def run_one(job: Job) -> Row:
    """Makes one run."""
    outcome = run_scenario(job.spec, step_times=load_step_time, folders=(data_folder(),), clock=perf_counter)
    return row_of(job.label, job.rate, outcome, job.measure)
