"""From keys to a decision: the candidate with the highest key, scores by its idle blocks."""

from __future__ import annotations

from collections.abc import Callable

from millrace.contracts.observers import CandidateScore
from millrace.contracts.plan import InstanceRole
from millrace.policies.migration.view import TargetDecision, TargetQuestion, TargetView

#: Scores told per decision.
SCORES_MAX = 16

#: Sorts candidates: the highest wins.
Key = Callable[[TargetView], tuple[float, ...]]


def pick(question: TargetQuestion, key: Key) -> TargetDecision:
    """The candidate with the highest key; with a handoff those that only decode come first, equal ones by name."""
    if not question.candidates:
        return TargetDecision(None, "no instance can take it", list(question.filtered[:SCORES_MAX]))

    def rank(target: TargetView) -> tuple[float, ...]:
        decodes = question.handoff and target.role is InstanceRole.DECODE
        return (float(decodes), *key(target))

    order = sorted(question.candidates, key=rank, reverse=True)  # stable: equal ones stay in order of name
    chosen = order[0]
    idle = chosen.idle_after(question.blocks)
    where = "on this machine" if chosen.same_machine else "elsewhere"
    reason = f"best of {len(order)}: {idle} of {chosen.blocks_total} blocks idle with it, {where}"
    scores = [CandidateScore(target.name, idle_share(target, question.blocks)) for target in order[:SCORES_MAX]]
    return TargetDecision(chosen.name, reason, [*scores, *question.filtered[: SCORES_MAX - len(scores)]])


def idle_share(target: TargetView, blocks: int) -> float:
    """Share of its blocks that would be idle with it, 0 to 1."""
    return max(0.0, target.idle_after(blocks) / target.blocks_total) if target.blocks_total else 0.0
