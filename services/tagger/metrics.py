"""Metrics of a tagger: plain figures that the actor updates and Prometheus reads on each scrape."""

from __future__ import annotations

from typing import Any

from millrace.actor.metric_set import MetricSet
from millrace.lengths.estimate import LengthEstimate
from prometheus_client.registry import CollectorRegistry

#: Weight of the newest outcome in the recent error: a half-life of 35 outcomes.
RECENT_WEIGHT = 0.02


class TaggerMetrics(MetricSet):
    """All of one tagger.

    Attributes:
        outcomes: ``learnt``, ``unmatched`` (asked of another tagger, or of none) or ``unusable``.
        trainings: ``replaced``, ``kept`` (the candidate was not better) or ``failed``.
        recent_error: Difference of median and real length, as a mean that forgets, by source.
        file_problems: Files that could not be read or written.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__("millrace_tagger", registry)
        counter = self.counter
        self.answers = counter("answers", "Length tags given", "source")
        self.outcomes = counter("outcomes", "Outcomes heard", "result")
        self.judged = counter("judged", "Outcomes compared with the tag that was given", "source")
        self.above_p90 = counter("above_p90", "Outcomes longer than the predicted 90th percentile", "source")
        self.trainings = counter("trainings", "Trainings of a length model", "result")
        self.file_problems = 0
        self.total("file_problems", "Files of lengths that could not be read or written")
        self.recent_error: dict[str, float] = {}
        text = "Recent mean difference of median and length"
        self.gauges("recent_error_tokens", text, "source", read=self.recent_error.items)

    def judge(self, source: str, said: LengthEstimate, length: int) -> None:
        error = abs(said.p50 - length)
        self.judged.add(source)
        self.above_p90.add(source, by=length > said.p90)
        before = self.recent_error.get(source, error)
        weight = max(RECENT_WEIGHT, 1.0 / self.judged.counts[(source,)])
        self.recent_error[source] = before + (error - before) * weight

    def plain(self) -> dict[str, Any]:
        return {"answers": self.answers.plain(), "outcomes": self.outcomes.plain(), "trainings": self.trainings.plain()}
