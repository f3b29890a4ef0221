"""Least delay: where transfer, the sequence's own decoding, and what it delays there are shortest together."""

from __future__ import annotations

from random import Random

import msgspec

from millrace.contracts.observers import CandidateScore
from millrace.contracts.plan import InstanceRole
from millrace.policies.migration.ranking import SCORES_MAX, idle_share
from millrace.policies.migration.view import TargetDecision, TargetQuestion, TargetView

#: Share of its memory that must stay idle at an instance whose queue is let be.
IDLE_MIN = 0.1

weighs_pairs = True


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bandwidths, steps and rests that count until they are measured or predicted, and the cost of one more sequence.

    Attributes:
        near_bytes_per_s, far_bytes_per_s: Bandwidth to a target on the same machine, and elsewhere, before the first
            transfer; above 0.
        step_ms: Time of a step of an instance that has told none; above 0.
        rest_tokens: Tokens still to come where nothing is predicted; at least 1.
        growth: Share by which one more sequence makes each step of a full batch longer, per sequence that waits for
            it; 0 to 1. A batch of 32 that takes 1.3 times as long as one of 1 has about 0.01.
    """

    near_bytes_per_s: float = 10e9
    far_bytes_per_s: float = 1.25e9
    step_ms: float = 20.0
    rest_tokens: int = 200
    growth: float = 0.01

    def __post_init__(self) -> None:
        """Refuses what cannot be. Raises ValueError naming the field."""
        for field in ("near_bytes_per_s", "far_bytes_per_s", "step_ms"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"{field} must be above 0 and finite, is {getattr(self, field)}")
        if self.rest_tokens < 1:
            raise ValueError(f"rest_tokens must be at least 1, is {self.rest_tokens}")
        if not 0 <= self.growth <= 1:
            raise ValueError(f"growth must be in [0, 1], is {self.growth}")


def decide(question: TargetQuestion, parameters: Parameters, now_ns: int, rng: Random) -> TargetDecision:
    """The candidate with the least delay in seconds; equal ones by idle memory, then by name.

    With a handoff those that only decode come first. An instance with a queue and little idle memory comes after all
    others: what waits there takes that memory first. With enough of it a queue is what has just arrived.
    """
    if not question.candidates:
        return TargetDecision(None, "no instance can take it", list(question.filtered[:SCORES_MAX]))

    def rank(target: TargetView) -> tuple[float, ...]:
        others = question.handoff and target.role is not InstanceRole.DECODE
        delay_s = transfer_s(question, target, parameters) + decoding_s(question, target, parameters)
        idle = idle_share(target, question.blocks)
        short = target.waiting > 0 and idle < IDLE_MIN
        return (float(others), float(short), delay_s, -idle)

    order = sorted(question.candidates, key=rank)  # stable: equal ones stay in order of name
    chosen, best_s = order[0], rank(order[0])[2]
    moving_s = transfer_s(question, chosen, parameters)
    reason = f"least delay of {len(order)}: {moving_s * 1e3:.0f} ms of transfer, {best_s - moving_s:.2f} s of decoding"
    scores = [CandidateScore(target.name, best_s / max(1e-9, best_s, rank(target)[2])) for target in order[:SCORES_MAX]]
    return TargetDecision(chosen.name, reason, [*scores, *question.filtered[: SCORES_MAX - len(scores)]])


def transfer_s(question: TargetQuestion, target: TargetView, parameters: Parameters) -> float:
    """Seconds until the blocks that the target lacks are there."""
    blocks = max(0, question.blocks_held - target.blocks_there)
    unmeasured = parameters.near_bytes_per_s if target.same_machine else parameters.far_bytes_per_s
    return blocks * question.block_bytes / (target.bytes_per_s or unmeasured)


def decoding_s(question: TargetQuestion, target: TargetView, parameters: Parameters) -> float:
    """Seconds that the sequence decodes there, and by which those that decode beside it end later, summed."""
    rest = question.rest_tokens or parameters.rest_tokens
    step_s = target.step_ns / 1e9 or parameters.step_ms / 1e3
    return rest * step_s * (1 + parameters.growth * (target.running + target.arriving))
