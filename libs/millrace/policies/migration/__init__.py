"""Target policies by name: which instance takes a running sequence; and when to stop copying and freeze."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from millrace.policies.migration.filtering import Neighbour, Wish, compatible, sifted
from millrace.policies.migration.freezing import freeze_now
from millrace.policies.migration.least_delay import policy as least_delay
from millrace.policies.migration.most_idle import policy as most_idle
from millrace.policies.migration.nearest import policy as nearest
from millrace.policies.migration.view import TargetDecision, TargetQuestion, TargetView

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


class TargetPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (question, parameters, now_ns, rng) -> decision. These policies keep no state.
        parameters: Struct of its parameters; every field has a default.
        weighs_pairs: Whether it needs measured bandwidths and what was sent where.
    """

    name: str
    decide: Decide
    parameters: type[msgspec.Struct]
    weighs_pairs: bool = False


class _Module(Protocol):
    @property
    def decide(self) -> Decide: ...

    @property
    def Parameters(self) -> type[msgspec.Struct]: ...  # noqa: N802 a class


def _policy(name: str, module: _Module, *, weighs_pairs: bool = False) -> TargetPolicy:
    return TargetPolicy(name=name, decide=module.decide, parameters=module.Parameters, weighs_pairs=weighs_pairs)


#: To add a policy: its import above and a line here.
_ALL = (
    _policy("least_delay", least_delay, weighs_pairs=True),
    _policy("most_idle", most_idle),
    _policy("nearest", nearest),
)

TARGET_POLICIES: Mapping[str, TargetPolicy] = MappingProxyType({p.name: p for p in _ALL})
