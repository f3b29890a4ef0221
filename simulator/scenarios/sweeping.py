"""Many runs of one scenario: every combination of some values and seeds, on as many processes as there are cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.policies.registry import policy_name

from simulator.scenarios.reading import ScenarioError, read_scenario
from simulator.scenarios.running import ScenarioOutcome, run_scenario
from simulator.scenarios.spec import ScenarioSpec
from simulator.scenarios.statistics import Summary, summarise

if TYPE_CHECKING:
    from simulator.scenarios.shown_run import ShownRun


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One run that is to be made.

    Attributes:
        label: What sets it apart, but for its seed.
    """

    label: str
    spec: ScenarioSpec


class RunInputs(msgspec.Struct, frozen=True, kw_only=True):
    """External inputs of runs; sent to other processes.

    Attributes:
        step_times: Loads a step-time model by name or path. A function of a module, so that it can travel.
        folders: Where traces may be.
        clock: Real time, seconds.
    """

    step_times: Callable[[str], LinearStepTime]
    folders: tuple[Path, ...]
    clock: Callable[[], float] = float

    def run(self, spec: ScenarioSpec, shown: ShownRun | None = None) -> ScenarioOutcome:
        return run_scenario(spec, step_times=self.step_times, folders=self.folders, clock=self.clock, shown=shown)


def variants(path: Path, settings: Sequence[str], sweeps: Sequence[str], seeds: int) -> list[Variant]:
    """Every combination of the sweeps' values, each with so many seeds from the scenario's own on.

    Args:
        sweeps: ``key=value,value,...`` each.

    Raises:
        ScenarioError: the scenario, a setting or a sweep is wrong.
    """
    axes = [_axis(sweep) for sweep in sweeps]
    made: list[Variant] = []
    for choice in product(*axes):
        spec = read_scenario(path, [*settings, *(f"{key}={value}" for key, value in choice)])
        label = ", ".join(policy_name(value) for key, value in choice if not key.endswith("rate_per_s"))
        label = label or policy_name(spec.dispatch.policy)
        for seed in range(spec.seed, spec.seed + seeds):
            made.append(Variant(label=label, spec=msgspec.structs.replace(spec, seed=seed)))
    return made


def run_all(wanted: Sequence[Variant], surroundings: RunInputs, *, jobs: int) -> Iterator[Summary]:
    """Summaries in the order of the variants, each as soon as it and those before it are there."""
    work = [(variant, surroundings) for variant in wanted]
    if jobs <= 1 or len(work) == 1:
        yield from map(run_one, work)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(work))) as pool:
        yield from pool.imap(run_one, work)


def run_one(work: tuple[Variant, RunInputs], shown: ShownRun | None = None) -> Summary:
    """Runs one variant; its summary has the label as its name."""
    variant, surroundings = work
    return msgspec.structs.replace(summarise(surroundings.run(variant.spec, shown)), name=variant.label)


def _axis(sweep: str) -> list[tuple[str, str]]:
    key, equals, values = sweep.partition("=")
    if not key or not equals or not values:
        raise ScenarioError(f"--sweep {sweep}: must be key=value,value,...")
    return [(key, value.strip()) for value in values.split(",")]
