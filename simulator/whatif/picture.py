"""Picture of an answer: each figure's change with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simulator.whatif.answering import Asked, ChangeAnswer
from simulator.whatif.figures import ComparedFigure


def draw(question: Asked, found: Sequence[ChangeAnswer], path: Path) -> None:
    """Draws ratios: of the replay to the recording, and of each change to the unchanged cluster."""
    from matplotlib.figure import Figure

    rows = [("replayed / recorded", question.fidelity)] if question.fidelity else []
    rows += [(each.label, each.figures) for each in found]
    figure = Figure(figsize=(10, 2 + 2.2 * len(rows)), layout="constrained")
    for place, (label, figures) in enumerate(rows):
        axes = figure.add_subplot(len(rows), 1, place + 1)
        names, values = list(figures), list(figures.values())
        axes.errorbar([v.ratio for v in values], range(len(values)), xerr=_errors(values), fmt="o", capsize=3)
        axes.axvline(1.0, color="0.6", linewidth=1)
        axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        axes.invert_yaxis()
        axes.set_title(label, loc="left", fontsize="medium")
    if rows:
        figure.axes[-1].set_xlabel("ratio, 95 % interval")
    figure.savefig(path, dpi=110)


def _errors(values: Sequence[ComparedFigure]) -> list[list[float]]:
    return [[max(0.0, v.ratio - v.low) for v in values], [max(0.0, v.high - v.ratio) for v in values]]
