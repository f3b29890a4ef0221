"""A judge that is a model of the cluster: planned like a tier. It is asked about every answer that may be escalated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millrace.cascade.capacity import TierCapacity, TierDeployment
from millrace.cascade.replicas import ReplicaModel, ReplicaShape, TierWorkload
from millrace.cascade.routing import Routed
from millrace.cascade.sample import Booleans, Integers, JudgedSample

#: It answers with one token.
VERDICT_TOKENS = 1


#: Tokens of a question besides request and answer: 60 or 61 with the tokenizer of the models that ship.
QUESTION_TOKENS = 60

#: A verdict that takes longer is as bad as any.
VERDICT_S_MAX = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class JudgeTier:
    """A judging model.

    Attributes:
        shapes: Ways to run it.
        tokens: (N, C - 1), what it reads of each tier's answer but the last one's: request, answer and question.
    """

    shapes: Sequence[ReplicaShape]
    tokens: Integers

    def asked(self, routed: Routed) -> Booleans:
        """Answers that it is asked about, (N, C - 1). At threshold 0 any score will do, and nobody is asked."""
        mask = routed.reached[:, :-1] & (np.asarray(routed.thresholds) > 0)
        mask[:, routed.tiers[-1] :] = False
        return mask

    def capacity(self, routed: Routed, rate: float, model: ReplicaModel) -> TierCapacity:
        """Capacity under a routing of ``rate`` requests/s."""
        mask = self.asked(routed)
        if not mask.any():
            return TierCapacity([], 0.0)
        tokens = self.tokens[mask]
        workload = TierWorkload(tokens, np.full_like(tokens, VERDICT_TOKENS))
        key = b"judge" + np.packbits(mask).tobytes()
        curves = [(shape, curve) for shape in self.shapes if (curve := model.curve(workload, shape, key)) is not None]
        return TierCapacity(curves, rate * float(mask.sum()) / len(mask))


def question_tokens(sample: JudgedSample) -> Integers:
    """Tokens that a judge reads of each answer of a sample but the last tier's, (N, C - 1)."""
    return sample.prompt_tokens[:, :-1] + sample.output_tokens[:, :-1] + QUESTION_TOKENS


def judging_latency_s(tier: TierCapacity, deployment: TierDeployment) -> float:
    """p95 of a verdict where replicas share the questions by their rates; 0 where nobody asks, or nobody answers:
    confidence stands in for a judge that has no replica. At most VERDICT_S_MAX.
    """
    pairs = list(zip(deployment.replicas, deployment.rates, strict=True))
    if tier.rate <= 0 or not pairs:
        return 0.0
    curves = dict(tier.curves)
    load = tier.rate / sum(count * rate for (_, count), rate in pairs)
    return min(VERDICT_S_MAX, max(curves[shape].latency_s(load * rate) for (shape, _), rate in pairs))
