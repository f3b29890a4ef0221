"""Target policies by name: which instance takes a running sequence; and when to stop copying and freeze."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from millrace.policies.migration.filtering import Neighbour, Wish, compatible, sifted
from millrace.policies.migration.freezing import freeze_now
from millrace.policies.migration.least_delay import policy as least_delay
from millrace.policies.migration.most_idle import policy as most_idle
from millrace.policies.migration.nearest import policy as nearest
from millrace.policies.migration.view import TargetDecision, TargetQuestion, TargetView
from millrace.policies.registry import Policy, Registry

__all__ = [
    "TARGET_POLICIES",
    "Neighbour",
    "TargetDecision",
    "TargetPolicy",
    "TargetQuestion",
    "TargetView",
    "Wish",
    "compatible",
    "freeze_now",
    "sifted",
]

Decide = Callable[[TargetQuestion, Any, int, Random], TargetDecision]


class TargetPolicy(Policy, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (question, parameters, now_ns, rng) -> decision. These policies keep no state.
        weighs_pairs: Whether it needs measured bandwidths and what was sent where.
    """

    decide: Decide
    weighs_pairs: bool = False


#: To add a policy: its import above and a word here.
TARGET_POLICIES = Registry("migration", TargetPolicy, (least_delay, most_idle, nearest))
