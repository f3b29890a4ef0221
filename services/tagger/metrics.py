"""Metrics of a tagger: plain figures kept by the actor, and the collector that exposes them to Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from millrace.lengths.estimate import LengthEstimate
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

#: Weight of the newest outcome in the recent error: a half-life of 35 outcomes.
RECENT_WEIGHT = 0.02


class TaggerFigures:
    """Everything a tagger counts since its start.

    Attributes:
        answers: By source.
        outcomes: ``learnt``, ``unmatched`` (asked of another tagger, or of none) or ``unusable``.
        judged: Outcomes compared with what was said, by source.
        error_tokens: Sum of |median said - real length|, by source.
        above_p90: Outcomes longer than the p90 said, by source.
        recent_error: The same error, as a mean that forgets, by source.
        trainings: ``replaced``, ``kept`` (the candidate was not better) or ``failed``.
        problems: Files that could not be read or written.
    """

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.judged: Counter[str] = Counter()
        self.error_tokens: Counter[str] = Counter()
        self.above_p90: Counter[str] = Counter()
        self.recent_error: dict[str, float] = {}
        self.trainings: Counter[str] = Counter()
        self.problems = 0
        self.pending = 0

    def judge(self, source: str, said: LengthEstimate, length: int) -> None:
        """Compares what was said with a real length, tokens."""
        error = abs(said.p50 - length)
        self.judged[source] += 1
        self.error_tokens[source] += round(error)
        self.above_p90[source] += length > said.p90
        before = self.recent_error.get(source, error)
        weight = max(RECENT_WEIGHT, 1.0 / self.judged[source])
        self.recent_error[source] = before + (error - before) * weight

    def plain(self) -> dict[str, Any]:
        """For snapshots."""
        return {name: dict(v) if isinstance(v, dict) else v for name, v in vars(self).items()}


_COUNTERS = {
    "answers": ("source", "Length tags given"),
    "outcomes": ("result", "Outcomes heard"),
    "judged": ("source", "Outcomes compared with the tag that was given"),
    "error_tokens": ("source", "Sum of the differences between predicted median and real length, tokens"),
    "above_p90": ("source", "Outcomes longer than the predicted 90th percentile"),
    "trainings": ("result", "Trainings of a length model"),
}


class TaggerCollector:
    """Reads the figures when Prometheus asks."""

    def __init__(self, figures: Callable[[], TaggerFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yields every family once."""
        figures = self._figures()
        for name, (label, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"millrace_tagger_{name}", text, labels=[label])
            for value, count in getattr(figures, name).items():
                counter.add_metric([value], count)
            yield counter
        text = "Files of lengths that could not be read or written"
        yield CounterMetricFamily("millrace_tagger_file_problems", text, value=figures.problems)
        recent = GaugeMetricFamily(
            "millrace_tagger_recent_error_tokens", "Recent mean difference of median and length", labels=["source"]
        )
        for source, error in figures.recent_error.items():
            recent.add_metric([source], error)
        yield recent
        yield GaugeMetricFamily(
            "millrace_tagger_pending", "Answered requests whose end is awaited", value=figures.pending
        )
