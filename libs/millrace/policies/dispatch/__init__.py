"""Dispatch policies by name: which instance gets a new or a continued sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any

import msgspec

from millrace.policies.dispatch.fewest_requests_per_minute import policy as fewest_requests_per_minute
from millrace.policies.dispatch.infaas import policy as infaas
from millrace.policies.dispatch.join_shortest_queue import policy as join_shortest_queue
from millrace.policies.dispatch.llumnix import policy as llumnix
from millrace.policies.dispatch.random import policy as random
from millrace.policies.dispatch.round_robin import policy as round_robin
from millrace.policies.dispatch.view import Decision, DispatchView, InstanceView, Prediction

__all__ = ["DISPATCH_POLICIES", "Decision", "DispatchPolicy", "DispatchView", "InstanceView", "Prediction"]

#: Which candidates to have predicted: (view, parameters, rng) -> names.
Ask = Callable[[DispatchView, Any, Random], tuple[str, ...]]
Decide = Callable[[DispatchView, Any, Any, int, Random], tuple[Decision, Any]]


class DispatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (view, parameters, state, now_ns, rng) -> (Decision, next state).
        parameters: Struct of its parameters; every field has a default.
        initial_state: State before the first decision.
        ask: Names the candidates whose predictors are asked before ``decide`` is called; None where it needs none.
        needs_length: Whether it looks at ``expected_output_tokens``; where it does not, the tagger may be skipped.
    """

    name: str
    decide: Decide
    parameters: type[msgspec.Struct]
    initial_state: Any
    ask: Ask | None = None
    needs_length: bool = False


_ALL = (
    DispatchPolicy(name="random", decide=random.decide, parameters=random.Parameters, initial_state=random.State()),
    DispatchPolicy(
        name="round_robin",
        decide=round_robin.decide,
        parameters=round_robin.Parameters,
        initial_state=round_robin.State(),
    ),
    DispatchPolicy(
        name="fewest_requests_per_minute",
        decide=fewest_requests_per_minute.decide,
        parameters=fewest_requests_per_minute.Parameters,
        initial_state=fewest_requests_per_minute.State(),
    ),
    DispatchPolicy(name="infaas", decide=infaas.decide, parameters=infaas.Parameters, initial_state=infaas.State()),
    DispatchPolicy(name="llumnix", decide=llumnix.decide, parameters=llumnix.Parameters, initial_state=llumnix.State()),
    DispatchPolicy(
        name="join_shortest_queue",
        decide=join_shortest_queue.decide,
        parameters=join_shortest_queue.Parameters,
        initial_state=join_shortest_queue.State(),
    ),
)

DISPATCH_POLICIES: Mapping[str, DispatchPolicy] = MappingProxyType({p.name: p for p in _ALL})
