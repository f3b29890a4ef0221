"""The cascade of a cluster: which models answer one after another, and how their answers are judged."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.contracts.bounds import Processes, Score, Span

#: Name of a cascade where none is given.
CASCADE_NAME = "cascade"

#: Threshold of a tier where none is given: answers that are right in seven of ten cases are delivered.
THRESHOLD = 70.0


#: The judge that needs no process: ingress computes the score from the answer's log-probabilities.
CONFIDENCE = "confidence"


class CascadeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Several models of the cluster behind one name: the first answers, and the next where its answer scores too low.

    Attributes:
        name: Clients ask for it as ``model``. It is not the name of a model.
        tiers: Served names of models, in rising order of cost.
        thresholds: Least score, 0 to 100, at which an answer is delivered, one per tier but the last; empty for 70
            each. With ``quality`` or ``latency_s`` they hold until the first plan.
        quality: Mean quality of delivered answers that plans shall keep, 0 to 100; needs ``sample``.
        latency_s: p95 of requests that plans shall keep, seconds, in place of ``quality``; needs ``sample``.
        sample: Recorded answers of all tiers with the truth, one JSON object a line (.jsonl[.gz]), relative to the
            cluster's file: what plans are made from.
        period_s: How often the coordinator looks at whether the plan still fits, seconds.
        judge: ``confidence``, a name of ``JUDGES``, or the path of a judge's file.
        parameters: Of a judge that asks a model: ``model``, which is one of this cluster unless a ``url`` is given,
            ``key_file``, ``timeout_s``, and the judge's own.
        judges: Judge processes, where it asks a model; they share the questions.
        settings: Further fields of ingress's configuration of the cascade.
    """

    name: str = CASCADE_NAME
    tiers: list[str]
    thresholds: list[Score] = []
    quality: Score | None = None
    latency_s: Span | None = None
    sample: str = ""
    period_s: Span = 60.0
    judge: str = CONFIDENCE
    parameters: dict[str, Any] = {}
    judges: Processes = 1
    settings: dict[str, Any] = {}

    @property
    def tier_thresholds(self) -> list[float]:
        """One per tier; the last one's answer is delivered whatever it scores."""
        return [*(self.thresholds or [THRESHOLD] * (len(self.tiers) - 1)), 0.0]

    @property
    def judging_model(self) -> str:
        """Model of the cluster that judges; empty where none does."""
        if self.judge == CONFIDENCE or "url" in self.parameters:
            return ""
        return str(self.parameters.get("model", ""))

    @property
    def judge_processes(self) -> int:
        """Processes of the judge: none for ``confidence``, which ingress computes itself."""
        return 0 if self.judge == CONFIDENCE else self.judges
