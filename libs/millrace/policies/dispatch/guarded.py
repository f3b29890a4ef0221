"""A policy run so that its exception is a value: a user's file may raise, and no client may pay for it.

The caller decides what follows. An ingress runs the fallback policy, counts the fault and logs where it was raised.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from operator import attrgetter
from random import Random
from typing import Any

import msgspec

from millrace.policies.dispatch import Decision, DispatchPolicy, DispatchView
from millrace.policies.dispatch.view import named_views

_NAME = attrgetter("name")


class PolicyFault(msgspec.Struct, frozen=True):
    """Fault of a policy: it raised an exception, or named an instance that is no candidate.

    Attributes:
        where: ``file:line`` of the innermost frame inside the policy's own file, else of the function's first line.
        error: Type and text of the exception, or what is wrong with the decision.
    """

    where: str
    error: str

    def __str__(self) -> str:
        return f"{self.where}: {self.error}"


def run_decide(
    policy: DispatchPolicy, view: DispatchView, *, parameters: Any, state: Any, now_ns: int, rng: Random
) -> tuple[Decision, Any] | PolicyFault:
    """The policy's decision with its next state; a fault where it raises, or does not name one of the candidates."""
    try:
        decision, after = policy.decide(view, parameters, state, now_ns, rng)
        chosen = decision.chosen
    except Exception as error:  # noqa: BLE001 - whatever a user's policy raises
        return _fault(error, policy.decide)
    if chosen is not None and chosen not in map(_NAME, view.candidates):
        return PolicyFault(_location(policy.decide), f"decide chose {chosen!r}, which is no candidate")
    return decision, after


def run_ask(
    policy: DispatchPolicy, view: DispatchView, *, parameters: Any, rng: Random
) -> tuple[str, ...] | PolicyFault:
    """The candidates whose predictors the policy asks; a fault where it raises, or names one that is no candidate."""
    assert policy.ask is not None
    try:
        asked = tuple(policy.ask(view, parameters, rng))
    except Exception as error:  # noqa: BLE001 - whatever a user's policy raises
        return _fault(error, policy.ask)
    wanted = {str(name) for name in asked}
    strange = sorted(wanted.difference([each.name for each in named_views(view.candidates, wanted)]))
    if strange:
        return PolicyFault(_location(policy.ask), f"ask named {strange[0]!r}, which is no candidate")
    return asked


def _location(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def _fault(error: Exception, function: Callable[..., Any]) -> PolicyFault:
    place = _location(function)
    file = place.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return PolicyFault(f"{file}:{lines[-1]}" if lines else place, f"{type(error).__name__}: {error}")
