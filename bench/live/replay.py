"""A recorded run again, in simulation: the same arrivals, lengths and policy, engines with step times fitted to it.

What is taken from the live run: arrival times, prompt and output lengths, each engine's scheduler limits, and of every
other slice of two seconds the step times, fitted to each engine's snapshots, and how long messages took. What the
simulation then says is compared on the requests that arrived in the other slices.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from millrace.enginemodel.coefficients import coefficient_names, load_step_time
from millrace.enginemodel.registered import scheduler_parameters
from millrace.enginemodel.step_time_models import LinearStepTime

from bench.live.halves import fitted_on
from bench.live.neighbours import alone, slowdown, with_neighbours
from bench.live.recording import Figures, Recording
from bench.live.step_fit import Window, bias, fit, matrix, windows
from bench.live.transit import Transit
from simulator.scenarios.observer import FinishedRequest
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import run_scenario
from simulator.scenarios.spec import ScenarioSpec


class EngineFit(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's step times.

    Attributes:
        sums, error: On windows that were not fitted: sum of predicted over measured times, mean |error| of a window.
        slowdown: Each other engine of the host that computes makes steps longer by this share; ``model`` is without.
    """

    instance: str
    model: LinearStepTime
    windows: int
    sums: float
    error: float
    slowdown: float = 0.0


def engine_windows(recording: Recording) -> dict[str, list[Window]]:
    """Return the windows that each engine computed between its snapshots."""
    outputs = {f"{o.request}.{i}": tokens for o in recording.outcomes for i, tokens in enumerate(o.output_tokens)}
    names = [record.instance for record in recording.instances]
    found = {name: windows((s for s in recording.snapshots if s.instance == name), outputs) for name in names}
    return {name: with_neighbours(recording, name, rows) for name, rows in found.items()}


def fits(recordings: Sequence[Recording]) -> dict[str, EngineFit]:
    """Step times of each engine, from one half of all runs; judged on the other half.

    They start from the set that the engine names, where it names one that ships.

    Raises:
        ValueError: an engine did too little.
    """
    first: dict[str, list[Window]] = {}
    second: dict[str, list[Window]] = {}
    for recording in recordings:
        for name, found in engine_windows(recording).items():
            first.setdefault(name, []).extend(w for w in found if fitted_on(recording, w.at_ns))
            second.setdefault(name, []).extend(w for w in found if not fitted_on(recording, w.at_ns))
    named = {record.instance: record.step_time for recording in recordings for record in recording.instances}
    return {name: _fitted(name, named[name], rows, second[name]) for name, rows in sorted(first.items())}


def _fitted(name: str, step_time: str, rows: Sequence[Window], others: Sequence[Window]) -> EngineFit:
    slowed = slowdown(rows, matrix(rows)[0])
    model = fit(alone(rows, slowed), load_step_time(step_time) if step_time in coefficient_names() else None)
    sums, error = bias(model, alone(others, slowed))
    return EngineFit(instance=name, model=model, windows=len(rows), sums=sums, error=error, slowdown=slowed)


def trace_rows(recording: Recording) -> str:
    """Arrivals and lengths in the form of Azure's traces, which scenarios read."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for outcome in sorted(recording.outcomes, key=lambda each: each.arrival_ns):
        whole = datetime.datetime.fromtimestamp(outcome.arrival_ns // 1_000_000_000, datetime.UTC)
        digits = outcome.arrival_ns % 1_000_000_000 // 100
        stamp = f"{whole:%Y-%m-%d %H:%M:%S}.{digits:07d}"
        lines.append(f"{stamp},{outcome.prompt_tokens},{max(1, sum(outcome.output_tokens))}")
    return "\n".join(lines) + "\n"


def scenario(recording: Recording, *, fitted: dict[str, EngineFit], way: Transit, folder: Path) -> ScenarioSpec:
    """The run as a scenario; its files are written to ``folder``."""
    trace = folder / "arrivals.csv"
    trace.write_text(trace_rows(recording))
    groups = [_group(recording, each) for each in fitted.values()]
    table: dict[str, Any] = {
        "name": f"{recording.load.kind} {recording.policy}",
        "seed": recording.round,
        "cluster": {"groups": groups},
        "dispatch": {"policy": recording.policy},
        "workload": {
            "count": len(recording.outcomes),
            "stated": recording.load.kind == "stated",
            "arrivals": {"kind": "trace"},
            "lengths": {"kind": "trace", "path": trace.name, "format": "azure"},
        },
        "network": {
            "delay_us": way.hop_least,
            "jitter_us": max(0.0, way.hop_mean - way.hop_least),
            "worker_delay_us": way.worker_least,
            "worker_jitter_us": max(0.0, way.worker_mean - way.worker_least),
        },
        # As live.
        "intervals": {"status_ms": 20, "summary_ms": 25, "token_ms": 0, "run_ms": 0},
        "output": {"plots": False},
    }
    return scenario_of(table)


def _group(recording: Recording, fitted: EngineFit) -> dict[str, Any]:
    record = next(record for record in recording.instances if record.instance == fitted.instance)
    return {
        "name": fitted.instance,
        "instances": 1,
        "step_time": fitted.instance,
        "engine": msgspec.to_builtins(scheduler_parameters(record, prefix_caching=True)),
        "host": record.host,
        "neighbour_slowdown": fitted.slowdown,
    }


def replay(spec: ScenarioSpec, folder: Path, *, fitted: Mapping[str, EngineFit]) -> list[Figures]:
    """Runs it; requests in order of arrival. ``folder``: where its files are."""
    outcome = run_scenario(spec, step_times=lambda name: fitted[name].model, folders=(folder,))
    done = sorted((f for f in outcome.finished if f.outcome == "completed"), key=lambda f: f.arrival_ns)
    return [_figures(finished) for finished in done]


def _figures(finished: FinishedRequest) -> Figures:
    return Figures(
        request=str(finished.number),
        arrival_s=finished.arrival_ns / 1e9,
        prompt_tokens=finished.prompt_tokens,
        output_tokens=finished.output_tokens,
        ttft_s=finished.ttft_ns / 1e9,
        e2e_s=finished.e2e_ns / 1e9,
        placing_s=0.0,
        instance=finished.instance,
        predicted_ttft_s=_predicted(finished.predicted_ttft_ns),
        predicted_e2e_s=_predicted(finished.predicted_e2e_ns),
    )


def _predicted(value_ns: int) -> float:
    return float("nan") if value_ns < 0 else value_ns / 1e9
