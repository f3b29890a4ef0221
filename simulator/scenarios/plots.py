"""Pictures of scenarios: one run in time and as distributions, and several runs against their rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from millrace.policies.registry import policy_name

from simulator.scenarios.observer import EngineSample
from simulator.scenarios.running import ScenarioOutcome
from simulator.scenarios.statistics import Floats, Summary, tpot_ns

_NS = 1e9
#: Columns of the heat map; more than that cannot be distinguished.
_COLUMNS = 160
#: Columns that a rate is averaged over: samples and columns do not fall together.
_SMOOTHING = 5

Axes = Any
Figure = Any


def draw_run(outcome: ScenarioOutcome, folder: Path) -> list[Path]:
    """Draws one run's pictures into ``folder``; returns their files."""
    drawn: list[Path] = []
    for name, draw in (("latency.png", _latency), ("timeline.png", _timeline), ("instances.png", _instances)):
        figure = draw(outcome)
        if figure is not None:
            drawn.append(_write(figure, folder / name))
    return drawn


def draw_sweep(summaries: Sequence[Summary], folder: Path, *, slo_ttft_s: float) -> Path:
    """Draws latencies, goodput and preemptions of several runs against their arrival rate, one line per policy."""
    panels: list[tuple[str, Callable[[Summary], float], bool]] = [
        ("TTFT mean, s", lambda s: s.ttft_s.mean, True),
        ("TTFT P99, s", lambda s: s.ttft_s.p99, True),
        ("TPOT mean, ms", lambda s: 1000 * s.tpot_s.mean, False),
        ("end-to-end mean, s", lambda s: s.e2e_s.mean, False),
        ("goodput, share within the SLO", lambda s: s.goodput, False),
        ("preemptions per request", lambda s: s.preemptions / max(1, s.served), False),
    ]
    figure = _figure(13, 7)
    for index, (title, value, logarithmic) in enumerate(panels):
        axes = figure.add_subplot(2, 3, index + 1)
        _lines(axes, summaries, value)
        axes.set(title=title, xlabel="arrivals, requests/s")
        axes.set_yscale("log" if logarithmic else "linear")
        if not logarithmic:
            axes.set_ylim(bottom=0)
        if title == "TTFT P99, s" and slo_ttft_s:
            axes.axhline(slo_ttft_s, color="0.5", linestyle=":", linewidth=1)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    return _write(figure, folder / "sweep.png")


def _lines(axes: Axes, summaries: Sequence[Summary], value: Callable[[Summary], float]) -> None:
    for label in dict.fromkeys(summary.name for summary in summaries):
        points: dict[float, list[float]] = {}
        for summary in summaries:
            if summary.name == label:
                rate = summary.rate_per_s if math.isnan(summary.asked_per_s) else summary.asked_per_s
                points.setdefault(round(rate, 2), []).append(value(summary))
        rates = sorted(points)
        means = [float(np.mean(points[rate])) for rate in rates]
        axes.plot(rates, means, marker="o", markersize=3, label=label)


def _latency(outcome: ScenarioOutcome) -> Figure:
    """Distribution functions of the three latencies."""
    done = [record for record in outcome.finished if record.outcome == "completed"]
    if not done:
        return None
    slo = outcome.spec.slo
    panels = [
        ("time to first token, s", [record.ttft_ns / _NS for record in done], slo.ttft_ms / 1e3),
        ("mean time per output token, ms", [tpot_ns(r) / 1e6 for r in done if r.output_tokens > 1], slo.tpot_ms),
        ("end to end, s", [record.e2e_ns / _NS for record in done], slo.e2e_ms / 1e3),
    ]
    figure = _figure(13, 4)
    for index, (title, values, bound) in enumerate(panels):
        axes = figure.add_subplot(1, 3, index + 1)
        ordered = np.sort(np.array(values))
        axes.plot(ordered, np.arange(1, ordered.size + 1) / max(1, ordered.size))
        axes.set(xlabel=title, ylabel="share of requests", ylim=(0, 1))
        if index == 0:
            axes.set_xscale("log")
        if bound:
            axes.axvline(bound, color="0.5", linestyle=":", label="SLO")
            axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.suptitle(_title(outcome), fontsize="medium")
    return figure


def _timeline(outcome: ScenarioOutcome) -> Figure:
    """Requests in the engines, blocks, preemptions and tokens per second over time, all instances together."""
    grid = _Grid.of(outcome.samples)
    if grid is None:
        return None
    used, total = grid.of_field("blocks_used"), grid.of_field("blocks_total")
    figure = _figure(13, 7)
    panels = [
        ("sequences", [("running", grid.of_field("running").sum(0)), ("waiting", grid.of_field("waiting").sum(0))]),
        ("KV blocks in use, share", [("mean", (used / total).mean(0)), ("fullest", (used / total).max(0))]),
        ("preemptions so far", [("", grid.of_field("preemptions").sum(0))]),
        ("output tokens per second", [("", grid.rate("output_tokens_total"))]),
    ]
    for index, (title, lines) in enumerate(panels):
        axes = figure.add_subplot(2, 2, index + 1)
        for label, values in lines:
            axes.plot(grid.times_s[: len(values)], values, label=label, linewidth=1)
        axes.set(xlabel="time, s", title=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if lines[0][0]:
            axes.legend(fontsize="small")
    figure.suptitle(_title(outcome), fontsize="medium")
    return figure


def _instances(outcome: ScenarioOutcome) -> Figure:
    """Heat map: blocks in use and sequences waiting, by instance and time."""
    grid = _Grid.of(outcome.samples)
    if grid is None:
        return None
    figure = _figure(13, 7)
    blocks = grid.of_field("blocks_used") / grid.of_field("blocks_total")
    for index, (title, values, top) in enumerate(
        (("KV blocks in use, share", blocks, 1.0), ("sequences waiting", grid.of_field("waiting"), None))
    ):
        axes = figure.add_subplot(2, 1, index + 1)
        extent = (grid.times_s[0], grid.times_s[-1], len(grid.names) - 0.5, -0.5)
        picture = axes.imshow(
            values, aspect="auto", interpolation="nearest", extent=extent, vmin=0, vmax=top, cmap="viridis"
        )
        axes.set(title=title, xlabel="time, s")
        if len(grid.names) <= 32:
            axes.set_yticks(range(len(grid.names)), grid.names, fontsize="x-small")
        else:
            axes.set_ylabel(f"{len(grid.names)} instances")
        figure.colorbar(picture, ax=axes, pad=0.01)
    figure.suptitle(_title(outcome), fontsize="medium")
    return figure


class _Grid:
    """Samples of all instances at common times: each instance's last one before."""

    def __init__(self, names: list[str], by_name: dict[str, list[EngineSample]], times_ns: Floats) -> None:
        self.names = names
        self.times_s = times_ns / _NS
        self._by_name = by_name
        self._places = [
            np.searchsorted([sample.at_ns for sample in by_name[name]], times_ns, side="right") - 1 for name in names
        ]

    @classmethod
    def of(cls, samples: Sequence[EngineSample]) -> _Grid | None:
        """None where there are too few samples to draw."""
        by_name: dict[str, list[EngineSample]] = {}
        for sample in samples:
            by_name.setdefault(sample.instance, []).append(sample)
        last_ns = max((sample.at_ns for sample in samples), default=0)
        if last_ns <= 0:
            return None
        return cls(sorted(by_name), by_name, np.linspace(0, last_ns, _COLUMNS))

    def of_field(self, field: str) -> Floats:
        """[instance, time]: the field, at its first value before the first sample."""
        rows = []
        for name, places in zip(self.names, self._places, strict=True):
            values = np.array([getattr(sample, field) for sample in self._by_name[name]], dtype=np.float64)
            rows.append(values[np.maximum(places, 0)])
        return np.array(rows)

    def rate(self, field: str) -> Floats:
        """[time]: growth per second of the sum over instances, smoothed; a restarted instance begins at 0 again.

        Counters are taken as growing evenly between two samples: a column may be shorter than the time between them.
        """
        rows = []
        for name in self.names:
            samples = self._by_name[name]
            at_s = [sample.at_ns / _NS for sample in samples]
            rows.append(np.interp(self.times_s, at_s, [getattr(sample, field) for sample in samples]))
        growth = np.maximum(0.0, np.diff(np.array(rows), axis=1)).sum(0)
        window = np.ones(_SMOOTHING)
        smooth = np.convolve(growth, window, "same") / np.convolve(np.ones_like(growth), window, "same")
        return np.asarray(smooth / np.diff(self.times_s))


def _title(outcome: ScenarioOutcome) -> str:
    spec = outcome.spec
    return f"{spec.name}: {policy_name(spec.dispatch.policy)}, {len(outcome.finished):,} requests, seed {spec.seed}"


def _figure(width: float, height: float) -> Figure:
    """No window system: drawn straight into a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MatplotlibFigure

    figure = MatplotlibFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
