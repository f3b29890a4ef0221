"""Dispatch policies by name: which instance gets a new or a continued sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from millrace.policies.dispatch.asking import QueryParameters
from millrace.policies.dispatch.fewest_requests_per_minute import policy as fewest_requests_per_minute
from millrace.policies.dispatch.forecast import policy as forecast
from millrace.policies.dispatch.infaas import policy as infaas
from millrace.policies.dispatch.join_shortest_queue import policy as join_shortest_queue
from millrace.policies.dispatch.llumnix import policy as llumnix
from millrace.policies.dispatch.random import policy as random
from millrace.policies.dispatch.round_robin import policy as round_robin
from millrace.policies.dispatch.view import Decision, DispatchView, InstanceView, Prediction

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


class DispatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of the registry.

    Attributes:
        decide: The pure function: (view, parameters, state, now_ns, rng) -> (Decision, next state).
        parameters: Struct of its parameters; every field has a default. Extends ``QueryParameters`` where there is
            ``ask``.
        initial_state: State before the first decision.
        ask: Names the candidates whose predictors are asked before ``decide`` is called; None where it needs none.
            Where it names nobody, ``decide`` is called at once.
        needs_length: Whether it looks at ``expected_output_tokens``; where it does not, the tagger may be skipped.
    """

    name: str
    decide: Decide
    parameters: type[msgspec.Struct]
    initial_state: Any
    ask: Ask | None = None
    needs_length: bool = False


class _Module(Protocol):
    """Interface of a policy's module."""

    @property
    def decide(self) -> Decide: ...

    @property
    def Parameters(self) -> type[msgspec.Struct]: ...  # noqa: N802 a class

    @property
    def State(self) -> type[msgspec.Struct]: ...  # noqa: N802 a class


def _policy(name: str, module: _Module, *, ask: Ask | None = None, needs_length: bool = False) -> DispatchPolicy:
    return DispatchPolicy(
        name=name,
        decide=module.decide,
        parameters=module.Parameters,
        initial_state=module.State(),
        ask=ask,
        needs_length=needs_length,
    )


#: To add a policy: its import above and a line here.
_ALL = (
    _policy("random", random),
    _policy("round_robin", round_robin),
    _policy("fewest_requests_per_minute", fewest_requests_per_minute),
    _policy("infaas", infaas),
    _policy("llumnix", llumnix),
    _policy("join_shortest_queue", join_shortest_queue),
    _policy("forecast", forecast, ask=forecast.ask, needs_length=True),
)

DISPATCH_POLICIES: Mapping[str, DispatchPolicy] = MappingProxyType({p.name: p for p in _ALL})
