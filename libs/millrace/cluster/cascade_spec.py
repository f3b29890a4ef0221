"""The cascade of a cluster: which models answer one after another."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.contracts.bounds import Score, Span

#: Name of a cascade where none is given.
CASCADE_NAME = "cascade"

#: Threshold of a tier where none is given: answers that are right in seven of ten cases are delivered.
THRESHOLD = 70.0


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
        settings: Further fields of ingress's configuration of the cascade.
    """

    name: str = CASCADE_NAME
    tiers: list[str]
    thresholds: list[Score] = []
    quality: Score | None = None
    latency_s: Span | None = None
    sample: str = ""
    period_s: Span = 60.0
    settings: dict[str, Any] = {}

    @property
    def tier_thresholds(self) -> list[float]:
        """One per tier; the last one's answer is delivered whatever it scores."""
        return [*(self.thresholds or [THRESHOLD] * (len(self.tiers) - 1)), 0.0]
