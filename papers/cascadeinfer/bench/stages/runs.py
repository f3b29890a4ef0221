"""Runs of scenarios as rows: made on some processes, kept in a file, never made twice."""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.scenarios.rows import key_of
from papers.cascadeinfer.unequal import load_unequal
from simulator.scenarios.observer import FinishedRequest
from simulator.scenarios.running import ScenarioOutcome, run_scenario
from simulator.scenarios.spec import ScenarioSpec
from simulator.scenarios.statistics import last_samples, tpot_ns, within

#: Exit status where --stop-after ended a figure before all its runs were made.
OUT_OF_TIME = 75

#: Left out of the arrivals of each run: while the cluster fills, and while it empties.
FIRST, LAST = 0.35, 0.15


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run, of the requests in its middle. Times in seconds.

    Attributes:
        norm: Normalised latency: end-to-end time over output tokens, mean over requests.
        deciles: The same by decile of the total length, shortest first.
        good: Share of the requests within the SLO.
        output_cv: Coefficient of variation of output tokens over instances, in windows of ten seconds.
        trades: What brokers counted; see ScenarioCluster.trades.
        rise: ``norm`` of those that arrived in the later half over that of the earlier half, less one: near 0 in a
            steady state, more where the load is not borne.
        cpu_s: Processor time of the run.
    """

    label: str
    seed: int
    key: str
    served: int
    lost: int
    norm: float
    norm_p95: float
    ttft: float
    ttft_p99: float
    tpot: float
    tpot_p99: float
    e2e: float
    e2e_p99: float
    good: float
    deciles: list[float]
    output_cv: float
    preemptions: int
    moved: int
    refused: int
    messages: int
    virtual_s: float
    cpu_s: float
    trades: dict[str, int]
    rise: float = math.nan


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is wanted; the seed is in ``spec``."""

    label: str
    spec: ScenarioSpec


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line options that every figure takes."""

    seeds: int
    cores: int
    path: Path | None
    until_s: float = math.inf

    def jobs(self, specs: Mapping[str, ScenarioSpec]) -> list[Job]:
        """One job per label and seed, seed by seed, so that what is cut off early is still paired."""
        return [
            Job(label=label, spec=msgspec.structs.replace(spec, seed=seed))
            for seed in range(self.seeds)
            for label, spec in specs.items()
        ]


def add_options(parser: argparse.ArgumentParser, *, seeds: int) -> None:
    """The arguments that make RunOptions."""
    parser.add_argument("--seeds", type=int, default=seeds, help="default %(default)s")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="default %(default)s")
    parser.add_argument("--rows", type=Path, help="keep each run's figures here, JSON lines, and make no run twice")
    parser.add_argument(
        "--stop-after", type=float, default=math.inf, metavar="S", help="begin no run later; print what is there"
    )


def options(arguments: argparse.Namespace) -> RunOptions:
    """From what was parsed."""
    return RunOptions(
        seeds=arguments.seeds,
        cores=arguments.cores,
        path=arguments.rows,
        until_s=time.monotonic() + arguments.stop_after,
    )


def run_all(jobs: Sequence[Job], chosen: RunOptions) -> list[StageRow]:
    """Rows in the order of the jobs; those that time did not allow are missing, and told on stderr."""
    known = _kept(chosen.path)
    wanted: list[Job] = []
    for job in jobs:
        if key_of(job.spec) not in known and key_of(job.spec) not in {key_of(each.spec) for each in wanted}:
            wanted.append(job)
    for row in _run(wanted, chosen):
        known[row.key] = row
        if chosen.path is not None:
            chosen.path.parent.mkdir(parents=True, exist_ok=True)
            with chosen.path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
    found = [(job, known.get(key_of(job.spec))) for job in jobs]
    missing = sum(row is None for _, row in found)
    if missing:
        print(f"{missing} of {len(jobs)} runs were not made: time was up")
    return [msgspec.structs.replace(row, label=job.label) for job, row in found if row is not None]


def _kept(path: Path | None) -> dict[str, StageRow]:
    if path is None or not path.exists():
        return {}
    rows = [kept_row(line) for line in path.read_bytes().splitlines()]
    return {row.key: row for row in rows}


def kept_row(line: bytes) -> StageRow:
    """A row as it was written; JSON has null for NaN, a figure that a run does not have."""
    fields = {name: _or_nan(value) for name, value in msgspec.json.decode(line).items()}
    return msgspec.convert(fields, StageRow)


def _or_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_or_nan(each) for each in value]
    return math.nan if value is None else value


def _run(jobs: Sequence[Job], chosen: RunOptions) -> Iterator[StageRow]:
    portion = max(1, chosen.cores)
    for some in (jobs[at : at + portion] for at in range(0, len(jobs), portion)):
        if time.monotonic() >= chosen.until_s:
            return
        if portion == 1 or len(some) == 1:
            rows: Iterator[StageRow] = map(run_one, some)
            yield from _told(rows)
            continue
        with multiprocessing.get_context("spawn").Pool(len(some)) as pool:
            yield from _told(pool.imap_unordered(run_one, some))


def _told(rows: Iterator[StageRow]) -> Iterator[StageRow]:
    for row in rows:
        figures = f"{1e3 * row.norm:.2f} ms/token, {row.moved} moves, {row.lost} lost, {row.cpu_s:.0f} s"
        print(f"  {row.label}, seed {row.seed}: {figures}", file=sys.stderr, flush=True)
        yield row


def run_one(job: Job) -> StageRow:
    """Makes one run."""
    began_s = time.process_time()
    outcome = run_scenario(job.spec, step_times=load_unequal)
    return row_of(job.label, outcome, time.process_time() - began_s)


def row_of(label: str, outcome: ScenarioOutcome, cpu_s: float) -> StageRow:
    """The row of a run."""
    spec, residents = outcome.spec, outcome.spec.workload.residents
    count = spec.workload.count - residents
    low, high = residents + round(FIRST * count), residents + round((1 - LAST) * count)
    middle = [record for record in outcome.finished if low <= record.number < high]
    done = [record for record in middle if record.outcome == "completed" and record.output_tokens > 0]
    norm = np.array([record.e2e_ns / 1e9 / record.output_tokens for record in done])
    ttft = np.array([record.ttft_ns / 1e9 for record in done])
    tpot = np.array([tpot_ns(record) / 1e9 for record in done if record.output_tokens > 1])
    e2e = np.array([record.e2e_ns / 1e9 for record in done])
    ends = Counter(migration.outcome for migration in outcome.migrations)
    return StageRow(
        label=label,
        seed=spec.seed,
        key=key_of(spec),
        served=len(done),
        lost=high - low - len(done),
        norm=float(norm.mean()),
        norm_p95=float(np.percentile(norm, 95)),
        ttft=float(ttft.mean()),
        ttft_p99=float(np.percentile(ttft, 99)),
        tpot=float(tpot.mean()),
        tpot_p99=float(np.percentile(tpot, 99)),
        e2e=float(e2e.mean()),
        e2e_p99=float(np.percentile(e2e, 99)),
        good=sum(within(record, spec.slo) for record in done) / max(1, high - low),
        deciles=_deciles(done, norm),
        output_cv=_output_cv(outcome, low, high),
        preemptions=sum(last.preemptions for last in last_samples(outcome.samples).values()),
        moved=ends["moved"],
        refused=sum(ends.values()) - ends["moved"],
        messages=outcome.messages,
        virtual_s=outcome.virtual_s,
        cpu_s=cpu_s,
        trades=outcome.trades,
        rise=rise_of(done),
    )


def rise_of(done: Sequence[FinishedRequest]) -> float:
    """Share by which requests of the later half of arrivals took longer per token; nan for fewer than two."""
    ordered = sorted(done, key=lambda record: record.arrival_ns)
    halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
    if not all(halves):
        return math.nan
    earlier, later = (sum(each.e2e_ns / each.output_tokens for each in half) / len(half) for half in halves)
    return later / earlier - 1


def _deciles(done: Sequence[FinishedRequest], norm: np.ndarray) -> list[float]:
    lengths = np.array([record.prompt_tokens + record.output_tokens for record in done])
    parts = np.array_split(norm[np.argsort(lengths, kind="stable")], 10)
    return [float(part.mean()) if part.size else math.nan for part in parts]


def _output_cv(outcome: ScenarioOutcome, low: int, high: int, *, window_s: float = 10.0) -> float:
    """Mean over windows between the first and the last arrival that counts."""
    times = [record.arrival_ns for record in outcome.finished if low <= record.number < high]
    totals: dict[int, dict[str, int]] = defaultdict(dict)
    for sample in outcome.samples:
        if times and min(times) <= sample.at_ns <= max(times):
            window = totals[int(sample.at_ns / 1e9 / window_s)]
            window[sample.instance] = max(window.get(sample.instance, 0), sample.output_tokens_total)
    found: list[float] = []
    windows = sorted(totals)
    for before, after in itertools.pairwise(windows):
        made = [totals[after][name] - totals[before][name] for name in totals[after] if name in totals[before]]
        if made and sum(made) > 0:
            found.append(float(np.std(made) / np.mean(made)))
    return float(np.mean(found)) if found else math.nan
