"""Small pictures of the results: figures against rate or another quantity, a line per policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.scenarios.rows import Row
from bench.scenarios.tables import confidence

FOLDER = Path(__file__).parents[3] / "docs" / "figures"

#: What is drawn: title, value, whether its axis is logarithmic.
Panel = tuple[str, Callable[[Row], float], bool]

PANELS: tuple[Panel, ...] = (
    ("TTFT p99, s", lambda row: row.ttft_p99, True),
    ("TTFT mean, s", lambda row: row.ttft_mean, True),
    ("end to end mean, s", lambda row: row.e2e_mean, False),
    ("end to end p99, s", lambda row: row.e2e_p99, False),
)


def draw(
    name: str,
    rows: Sequence[Row],
    *,
    axis: str,
    labels: Sequence[str] = (),
    panels: Sequence[Panel] = PANELS,
    line_s: float = 0.0,
) -> Path:
    """Writes ``docs/figures/<name>.png``.

    Args:
        axis: What ``rate`` of the rows is.
        labels: One line each, in this order; all labels of the rows where there are none.
        line_s: A bound drawn into the first panel, seconds; 0 for none.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), dpi=80)
    for place, (title, value, logarithmic) in zip(axes, panels, strict=True):
        for label in labels or list(dict.fromkeys(row.label for row in rows)):
            points = _points([row for row in rows if row.label == label], value)
            place.plot([x for x, _ in points], [y for _, y in points], marker=".", linewidth=1, label=label)
        place.set(title=title, xlabel=axis, yscale="log" if logarithmic else "linear")
        place.grid(alpha=0.3)
    if line_s:
        axes[0].axhline(line_s, color="black", linewidth=0.8, linestyle="--")
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _points(rows: Sequence[Row], value: Callable[[Row], float]) -> list[tuple[float, float]]:
    rates = sorted({row.rate for row in rows})
    return [(rate, confidence([value(row) for row in rows if row.rate == rate])[0]) for rate in rates]
