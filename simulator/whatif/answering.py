"""Answers a question to a recording: how well the unchanged cluster is reproduced, and each change with its reason."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from millrace.cluster.spec import ClusterSpec
from millrace.policies.objectives import Objectives
from millrace.workloads.recording import RecordedLoad, write_recording

from simulator.scenarios.reading import ScenarioError
from simulator.scenarios.spec import ScenarioSpec
from simulator.whatif.changes import AskedChange, fragment, with_instances
from simulator.whatif.figures import (
    LATENCIES,
    ComparedFigure,
    ComparedShare,
    Latencies,
    compared,
    compared_shares,
    of_recording,
    of_replay,
    reason,
)
from simulator.whatif.objectives import objectives_of
from simulator.whatif.replaying import FittedCluster, LoadFile, Replayed, fitted_cluster, replay

if TYPE_CHECKING:
    from simulator.scenarios.shown_run import ShownRun

    #: Makes what shows a run, by its name.
    Show = Callable[[str], ShownRun]

#: Searches give up beyond so many times the recorded instances, or rate.
SEARCH_MAX = 16

#: A search for a rate ends with a bracket of this share.
RATE_SHARE = 0.05

_GOAL = re.compile(r"(ttft|tpot|e2e)_p(\d{1,2}(?:\.\d+)?)\s*<\s*(\d+(?:\.\d+)?)\s*(ms|s)")


class SearchGoal(msgspec.Struct, frozen=True, kw_only=True):
    """A quantile of a latency under a bound, ms, and no request unserved."""

    latency: str
    quantile: float
    bound_ms: float

    def holds(self, latencies: Latencies, replayed: Replayed) -> bool:
        values = getattr(latencies, self.latency)
        values = values[~np.isnan(values)]
        return not replayed.lost and bool(np.quantile(values, self.quantile) < self.bound_ms)


def parse_goal(text: str) -> SearchGoal:
    """A goal from ``ttft_p99<1s``.

    Raises:
        ScenarioError: it is none.
    """
    match = _GOAL.fullmatch(text.strip())
    if match is None:
        raise ScenarioError(f"--goal {text}: must be like ttft_p99<1s: {', '.join(LATENCIES)}, a percentile, ms or s")
    bound_ms = float(match[3]) * (1000.0 if match[4] == "s" else 1.0)
    return SearchGoal(latency=match[1], quantile=float(match[2]) / 100, bound_ms=bound_ms)


class ChangeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One change.

    Attributes:
        figures: Unchanged and changed, by name.
        within: Requests within the objectives.
        fragment: What it changes in the cluster's file, a key a line.
    """

    label: str
    figures: dict[str, ComparedFigure]
    within: ComparedShare
    reason: str
    fragment: str
    lost: int


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A load on a fitted cluster, ready for questions. Figures are those of the window, without its lead.

    Attributes:
        prompts: Tokens of each request's prompt.
        fidelity: Recorded and simulated, of the second half, to which nothing was fitted; empty where nothing tells.
        share: The same of the share within the objectives; None where nothing tells.
        objectives: That answers count requests by.
    """

    fitted: FittedCluster
    file: LoadFile
    prompts: list[int]
    base: Replayed
    fidelity: dict[str, ComparedFigure]
    objectives: Objectives
    share: ComparedShare | None = None
    lead: int = 0

    @property
    def count(self) -> int:
        """Requests of the window."""
        return self.file.count - self.lead

    def scenario(self, spec: ClusterSpec, speed: float = 1.0) -> ScenarioSpec:
        return self.file.scenario(self.fitted.table(spec), speed=speed)

    def recorded_figures(self) -> dict[str, float]:
        """Those of ``fidelity`` and ``share`` as recorded, and the rate of requests, 1/s; empty where nothing tells."""
        if self.share is None:
            return {}
        figures = {name: each.before for name, each in self.fidelity.items() if each.before > 0}
        return figures | {"within": self.share.before, "rate": self.file.count / max(self.file.span_s, 1e-9)}

    def latencies(self, replayed: Replayed) -> Latencies:
        return of_replay(replayed, self.file.count).part(np.arange(self.file.count) >= self.lead)


def asked(load: RecordedLoad, cluster: ClusterSpec, folder: Path, show: Show | None = None) -> Asked:
    """Fits the cluster to the recording and replays it unchanged.

    Args:
        cluster: As it was; models are folders.
        folder: For the load's file, as long as questions are asked.
        show: Makes what shows a replay, by its name.

    Raises:
        ScenarioError, ConfigError: the recording says too little, or the cluster's file something wrong.
    """
    path = folder / "load.jsonl"
    write_recording(path, load.rows())
    served = [row for _, row in load.requests]
    file = LoadFile(
        path=str(path),
        count=len(served),
        span_s=(served[-1].at_ns - served[0].at_ns) / 1e9,
        expected=any(row.expected is not None for row in served),
        shares=any(row.shared for row in served),
    )
    fitted = fitted_cluster(cluster, load, file)
    scenario = file.scenario(fitted.table(cluster))
    base = replay(scenario, fitted, show and show("replayed"))
    recorded, again = of_recording(served), of_replay(base, len(served))
    held_out = np.arange(len(served)) >= load.half
    known = not np.isnan(recorded.ttft[held_out]).all()
    second = recorded.part(held_out), again.part(held_out)
    objectives = objectives_of(cluster, scenario, fitted, served)
    return Asked(
        fitted=fitted,
        file=file,
        prompts=[row.prompt for row in served[load.lead :]],
        base=base,
        fidelity=compared(*second) if known else {},
        share=compared_shares(*second, objectives) if known else None,
        objectives=objectives,
        lead=load.lead,
    )


def answers(
    question: Asked, changes: Sequence[AskedChange], *, speed: float, jobs: int, show: Show | None = None
) -> Iterator[ChangeAnswer]:
    """Each change, in order. With another speed the first answer is the unchanged cluster's. What is shown is replayed
    here, one after the other.
    """
    unchanged = AskedChange(label=f"unchanged, {speed:g} x the rate", spec=question.fitted.spec)
    wanted = [*([unchanged] if speed != 1.0 else []), *changes]
    specs = [question.scenario(each.spec, speed) for each in wanted]
    replays = _replays(specs, question.fitted, jobs)
    if show is not None:
        replays = (replay(spec, question.fitted, show(each.label)) for spec, each in zip(specs, wanted, strict=True))
    for change, replayed in zip(wanted, replays, strict=True):
        yield answered(question, change, replayed)


def _replays(specs: Sequence[ScenarioSpec], fitted: FittedCluster, jobs: int) -> Iterator[Replayed]:
    work = partial(_replayed, fitted)
    if jobs <= 1 or len(specs) <= 1:
        yield from map(work, specs)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(specs))) as pool:
        yield from pool.imap(work, specs)


def _replayed(fitted: FittedCluster, spec: ScenarioSpec) -> Replayed:
    return replay(spec, fitted)


def answered(question: Asked, change: AskedChange, replayed: Replayed) -> ChangeAnswer:
    """The answer to a change."""
    before, after = question.latencies(question.base), question.latencies(replayed)
    prompts = np.array(question.prompts, dtype=np.float64)
    return ChangeAnswer(
        label=change.label,
        figures=compared(before, after),
        within=compared_shares(before, after, question.objectives),
        reason=reason(prompts, before, after, (question.base, replayed)),
        fragment=fragment(question.fitted.spec, change),
        lost=replayed.lost,
    )


#: Told after each try: what was tried, and whether the goal held.
Tell = Callable[[str, bool], None]


def fewest_instances(question: Asked, goal: SearchGoal, speed: float, tell: Tell) -> ChangeAnswer | None:
    """The smallest number of instances that keeps the goal; None where none does."""
    spec = question.fitted.spec
    running = sum(group.size for model in spec.models for group in model.groups)
    tried: dict[int, tuple[AskedChange, Replayed]] = {}

    def holds(count: int) -> bool:
        change = with_instances(spec, count)
        tried[count] = change, replay(question.scenario(change.spec, speed), question.fitted)
        held = goal.holds(question.latencies(tried[count][1]), tried[count][1])
        tell(change.label, held)
        return held

    found = least_count(holds, len(spec.models), running)
    return None if found is None else answered(question, *tried[found])


def least_count(holds: Callable[[int], bool], least: int, begin: int) -> int | None:
    """The smallest count that holds, where larger ones do too; None where SEARCH_MAX times ``begin`` does not."""
    low, high = least - 1, begin
    while not holds(high):
        low, high = high, high * 2
        if high > begin * SEARCH_MAX:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def highest_rate(question: Asked, goal: SearchGoal, tell: Tell) -> float:
    """The largest multiple of the recorded rate that keeps the goal; 0 where none does."""

    def holds(speed: float) -> bool:
        again = replay(question.scenario(question.fitted.spec, speed), question.fitted)
        held = goal.holds(question.latencies(again), again)
        tell(f"x{speed:.3g}", held)
        return held

    return greatest_rate(holds)


def greatest_rate(holds: Callable[[float], bool]) -> float:
    """The largest rate that holds, to RATE_SHARE of it, where smaller ones do too; 0 where 1 / SEARCH_MAX does not."""
    low, high = 0.0, 1.0
    while high <= SEARCH_MAX and holds(high):
        low, high = high, high * 2
    while high - low > RATE_SHARE * high:
        middle = (low + high) / 2
        if middle < 1 / SEARCH_MAX:
            return 0.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
