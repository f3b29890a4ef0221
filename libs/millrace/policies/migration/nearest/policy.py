"""Nearest: on the same machine where anybody has room there; the most idle one of those."""

from __future__ import annotations

from random import Random

import msgspec

from millrace.policies.migration.ranking import idle_share, pick
from millrace.policies.migration.view import TargetDecision, TargetQuestion, TargetView


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None."""


def decide(question: TargetQuestion, parameters: Parameters, now_ns: int, rng: Random) -> TargetDecision:
    """By machine, then by idle memory."""

    def key(target: TargetView) -> tuple[float, ...]:
        return (target.same_machine, idle_share(target, question.blocks))

    return pick(question, key)
