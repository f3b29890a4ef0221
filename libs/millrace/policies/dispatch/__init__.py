"""Dispatch policies by name: which instance gets a new or a continued sequence."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from millrace.policies.dispatch.asking import QueryParameters
from millrace.policies.dispatch.forecast import policy as forecast
from millrace.policies.dispatch.join_shortest_queue import policy as join_shortest_queue
from millrace.policies.dispatch.random import policy as random
from millrace.policies.dispatch.round_robin import policy as round_robin
from millrace.policies.dispatch.view import Decision, DispatchView, InstanceView, Prediction
from millrace.policies.registry import Policy, PolicyError, Registry

__all__ = [
    "DISPATCH_POLICIES",
    "Decision",
    "DispatchPolicy",
    "DispatchView",
    "InstanceView",
    "Prediction",
    "QueryParameters",
]

#: Which candidates to have predicted: (view, parameters, rng) -> names.
Ask = Callable[[DispatchView, Any, Random], tuple[str, ...]]
Decide = Callable[[DispatchView, Any, Any, int, Random], tuple[Decision, Any]]


class DispatchPolicy(Policy, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (view, parameters, state, now_ns, rng) -> (Decision, next state).
        ask: Names the candidates whose predictors are asked before ``decide`` is called; None where it needs none.
            Where it names nobody, ``decide`` is called at once. Its parameters extend ``QueryParameters``.
        needs_length: Whether it looks at ``expected_output_tokens``, as all do that ask; where it does not, the tagger
            may be skipped.
    """

    decide: Decide
    initial_state: Any
    ask: Ask | None = None
    needs_length: bool = False

    def __post_init__(self) -> None:
        if self.ask is None:
            return
        if not issubclass(self.parameters, QueryParameters):
            raise PolicyError("it has ask, so its Parameters must extend millrace.policies.dispatch.QueryParameters")
        msgspec.structs.force_setattr(self, "needs_length", True)


#: To add a policy: its folder, its import above and a word here.
DISPATCH_POLICIES = Registry("dispatch", DispatchPolicy, (random, round_robin, join_shortest_queue, forecast))
