"""A profile as a picture: fit against measurement, residuals, and decode steps by context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from millrace.profiling.profile import Measured, Profile

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

KINDS = ("decode", "prompt", "mixed")
COLOURS = {"decode": "#1f77b4", "prompt": "#d62728", "mixed": "#2ca02c"}
BATCHES_SHOWN = 7
NS_PER_MS = 1e6


def draw(profile: Profile, path: Path) -> None:
    """Writes the PNG."""
    figure, axes = pyplot.subplots(1, 3, figsize=(18, 5.5), constrained_layout=True)
    figure.suptitle(f"{profile.profiled.model}; {profile.profiled.hardware}; {profile.errors.said()}", fontsize=11)
    _against(axes[0], profile)
    _residuals(axes[1], profile)
    _decodes(axes[2], profile)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def kind(step: Measured) -> str:
    """Return the kind of a step: ``decode``, ``prompt`` or ``mixed``."""
    if not step.batch.prefills:
        return "decode"
    return "mixed" if step.batch.decodes else "prompt"


def _against(axes: Any, profile: Profile) -> None:
    """Fit against measurement; held-out steps are filled, fitted ones hollow."""
    for name in KINDS:
        for out, face in ((False, "none"), (True, COLOURS[name])):
            steps = [step for step in profile.steps if kind(step) == name and step.held_out == out]
            axes.scatter(
                [step.ns / NS_PER_MS for step in steps],
                [step.fitted_ns / NS_PER_MS for step in steps],
                s=12,
                facecolors=face,
                edgecolors=COLOURS[name],
                linewidths=0.5,
                alpha=0.6,
                label=f"{name}, {'held out' if out else 'fitted'} ({len(steps)})",
            )
    ends = [min(step.ns for step in profile.steps) / NS_PER_MS, max(step.ns for step in profile.steps) / NS_PER_MS]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="model, ms", title="steps")
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    axes.legend(fontsize=8)


def _residuals(axes: Any, profile: Profile) -> None:
    """Relative errors of held-out steps by measured time."""
    for name in KINDS:
        steps = [step for step in profile.steps if kind(step) == name and step.held_out]
        errors = [(step.fitted_ns / step.ns - 1.0) * 100 for step in steps]
        axes.scatter([step.ns / NS_PER_MS for step in steps], errors, s=12, color=COLOURS[name], alpha=0.6, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="measured, ms", ylabel="model too long by, %", title="residuals, held out")
    axes.set_ylim(-60, 60)
    _plain(axes.xaxis)
    axes.legend(fontsize=8)


def _decodes(axes: Any, profile: Profile) -> None:
    """Decode steps by context: measured points, fitted lines."""
    found: dict[int, list[Measured]] = {}
    for step in profile.steps:
        if kind(step) == "decode":
            found.setdefault(step.batch.decodes, []).append(step)
    shown = sorted(sorted(found, key=lambda count: -len(found[count]))[:BATCHES_SHOWN])
    for index, count in enumerate(shown):
        steps = sorted(found[count], key=lambda step: step.batch.context_tokens)
        contexts = [step.batch.context_tokens / count for step in steps]
        colour = f"C{index}"
        axes.scatter(contexts, [step.ns / NS_PER_MS for step in steps], s=8, color=colour, alpha=0.5)
        line = [step.fitted_ns / NS_PER_MS for step in steps]
        axes.plot(contexts, line, color=colour, linewidth=1.2, label=f"{count} sequences")
    axes.set(
        xscale="log", yscale="log", xlabel="mean context, tokens", ylabel="ms", title="decode steps (lines: model)"
    )
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    axes.legend(fontsize=8)


def _plain(axis: Any) -> None:
    """Marks 1, 2 and 5 of each decade of a logarithmic axis, as plain numbers: powers overlap where decades are few."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(ticker.NullFormatter())
