"""Escalation: whether an answer is delivered or goes to the next tier, and which tier that is.

    the score reaches the plan's threshold (``planned_threshold``)        deliver
    it reaches the threshold that the budget sets (``threshold_now``)     deliver
    there is no score, and the configuration accepts such answers         deliver
    no tier comes after this one (``is_last``)                            deliver
    a further tier can answer in time (``next_tier``)                     escalate
    otherwise                                                             deliver the best answer so far

The table in ``cascade/reactions.py`` says on which event each is evaluated. Before an answer is complete,
``commits_early`` can decide to deliver it and ``out_of_reach`` to reject it.
"""

from __future__ import annotations

import math

from millrace.contracts.cascade import SCORE_MAX
from millrace.judging.evidence import ConfidenceFeature, feature_of

from services.ingress.calls.limits import Refusal
from services.ingress.calls.messages import RefusalKind
from services.ingress.cascade.lifecycle import DeliveryReason
from services.ingress.cascade.open_cascade import Attempt, OpenCascade
from services.ingress.sequence import OpenSequence
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS

#: Failures that another model would repeat, or that leave no time for one.
_FINAL = frozenset({RefusalKind.INVALID, RefusalKind.AT_FAULT, RefusalKind.TIMEOUT, RefusalKind.STOPPING})


def acceptance(parent: OpenCascade) -> DeliveryReason | None:
    """Reason to deliver the scored answer; None where it is not delivered."""
    attempt = parent.attempt
    if attempt.score is None:
        return DeliveryReason.NOT_JUDGED if parent.served.config.without_score == "accept" else None
    assert attempt.threshold is not None
    if attempt.score >= planned_threshold(parent):
        return DeliveryReason.SCORE
    return DeliveryReason.ESCALATION_BUDGET if attempt.score >= attempt.threshold else None


def planned_threshold(parent: OpenCascade) -> float:
    """Least score at which the current attempt's answer is delivered, without the escalation budget."""
    if parent.call.cascade.quality is not None:
        return parent.call.cascade.quality
    plan, attempt = parent.served.plan, parent.attempt
    position = parent.served.position(attempt.model)
    if position is None:  # the plan that named it was replaced
        position = min(attempt.tier, len(plan.tiers) - 1)
    return plan.tiers[position].threshold


def threshold_now(state: IngressState, parent: OpenCascade) -> float:
    """The same, as the escalation budget has it."""
    budget = parent.served.budget(parent.attempt.model)
    return budget.threshold(planned_threshold(parent), state.now_ns)


def next_tier(state: IngressState, parent: OpenCascade) -> tuple[int | None, DeliveryReason]:
    """Position of the next tier that can answer in time; None with the reason where there is none."""
    after, tiers = _after(parent), parent.served.plan.tiers
    if is_last(parent):
        return None, DeliveryReason.LAST_TIER
    further = [position for position in planned_tiers(parent) if position > after]
    position = next((i for i in further if state.cluster.usable(tiers[i].model)), None)
    if position is None:
        return None, DeliveryReason.TIER_UNAVAILABLE
    expected_ns = tiers[position].p95_ns
    if state.now_ns + expected_ns >= _latest_ns(parent):
        return None, DeliveryReason.DEADLINE
    return position, DeliveryReason.SCORE


def is_last(parent: OpenCascade) -> bool:
    """Whether the plan has no further tier for this request."""
    after = _after(parent)
    return _ends_at(parent, after) or not any(position > after for position in planned_tiers(parent))


def planned_tiers(parent: OpenCascade) -> list[int]:
    """Positions of the tiers that the plan in force and the client allow, and whose model can take the request."""
    highest = parent.call.cascade.max_tier
    return [
        position
        for position, tier in enumerate(parent.served.plan.tiers)
        if (tier.instances or tier.awaited)
        and tier.model in parent.members
        and (highest is None or position <= highest)
    ]


def usable_tiers(state: IngressState, parent: OpenCascade) -> list[int]:
    """Those of them that have an instance now."""
    tiers = parent.served.plan.tiers
    return [position for position in planned_tiers(parent) if state.cluster.usable(tiers[position].model)]


def _after(parent: OpenCascade) -> int:
    """The highest position that was tried, by the plans of those times and by the one in force; -1 for none."""
    tried = [attempt.tier for attempt in parent.attempts]
    now = [parent.served.position(attempt.model) for attempt in parent.attempts]
    return max(tried + [position for position in now if position is not None], default=-1)


def _ends_at(parent: OpenCascade, position: int) -> bool:
    """Whether the entry policy asks no tier above this one. Where one has failed, it does."""
    return parent.last is not None and position >= parent.last and parent.attempt.outcome != "failed"


def _latest_ns(parent: OpenCascade) -> int:
    own_ns = int(parent.served.config.deadline_s * SECOND_NS)
    return min(parent.deadline_ns, parent.arrival_ns + own_ns) if own_ns else parent.deadline_ns


def resumable(state: IngressState, parent: OpenCascade) -> Attempt | None:
    """The highest attempt that was rejected early, was not run again, and whose model has an instance."""
    again = {attempt.model for attempt in parent.attempts if attempt.again}
    rejected = [
        attempt
        for attempt in parent.attempts
        if attempt.outcome == "rejected_early" and attempt.model not in again and state.cluster.usable(attempt.model)
    ]
    return max(rejected, key=lambda attempt: attempt.tier, default=None)


def may_follow(refusal: Refusal) -> bool:
    """Whether another model may succeed after this failure."""
    return refusal.kind not in _FINAL


def commits_early(state: IngressState, parent: OpenCascade) -> bool:
    """Whether the first tokens of the current attempt are good enough to stream it; sets its score."""
    attempt, config = parent.attempt, parent.served.config
    if not parent.call.cascade.early_commit or attempt.call is None or not attempt.deltas:
        return False
    if min(len(sequence.log) for sequence in attempt.call.sequences) < config.early_commit_tokens:
        return False
    score_by_confidence(state, attempt)
    return attempt.score is not None and attempt.score >= max(config.early_commit_score, threshold_now(state, parent))


def rejection_bound(state: IngressState, parent: OpenCascade) -> float | None:
    """Evidence below which the current attempt cannot reach its threshold; None where that cannot be known early."""
    config, judge = parent.served.config, state.judges.get(parent.attempt.model)
    if judge is None or not config.early_rejection or parent.served.plan.judge != "confidence" or parent.attempt.again:
        return None
    return judge.least_value(threshold_now(state, parent))


def out_of_reach(state: IngressState, attempt: Attempt) -> bool:
    """Whether some choice of the current attempt cannot reach the threshold any more."""
    judge, bound = state.judges.get(attempt.model), attempt.bound
    if judge is None or bound is None or attempt.call is None:
        return False
    for sequence in attempt.call.sequences:
        assert sequence.evidence is not None
        value = sequence.evidence.running.value(judge.feature)
        if value is not None and sequence.evidence.running.tokens and value < bound:
            return True
    return False


# The score that ingress computes itself.


def score_by_confidence(state: IngressState, attempt: Attempt) -> None:
    """Set the attempt's score from the log-probabilities so far: the least of its choices; None where one has none."""
    assert attempt.call is not None
    scores = [_confidence(state, attempt.model, sequence) for sequence in attempt.call.sequences]
    known = [score for score in scores if score is not None]
    attempt.score = min(known) if len(known) == len(scores) else None
    calibrated = attempt.model in state.judges
    attempt.judged_by = "" if attempt.score is None else "confidence" if calibrated else "confidence_uncalibrated"


def _confidence(state: IngressState, model: str, sequence: OpenSequence) -> float | None:
    assert sequence.evidence is not None
    judge = state.judges.get(model)
    if judge is not None:
        return judge.score(sequence.evidence.logprobs)
    mean = feature_of(ConfidenceFeature.MEAN, sequence.evidence.logprobs)
    return None if mean is None else SCORE_MAX * min(1.0, math.exp(mean))
