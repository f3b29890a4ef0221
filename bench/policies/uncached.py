"""Shared by all of these rules: everybody is asked, and an answer counts for its prefix hits alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgspec
from millrace.policies.dispatch.asking import QueryParameters, answered, draw
from millrace.policies.dispatch.pick import nothing, pick_lowest
from millrace.policies.dispatch.view import Decision, DispatchView, InstanceView


class Parameters(QueryParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Those of every policy that asks."""


class State(msgspec.Struct, frozen=True):
    """Nothing is remembered between decisions."""


def ask(view: DispatchView, parameters: Parameters, rng: Random) -> tuple[str, ...]:
    """Every candidate."""
    return draw(view, 0, rng)


def queued(c: InstanceView) -> int:
    """Prompt tokens that wait there for their prefill."""
    return c.waiting_prefill_tokens + c.in_flight_tokens


def requests(c: InstanceView) -> int:
    """Requests there, running and waiting."""
    return c.running + c.waiting + c.in_flight_sequences


def new_tokens(view: DispatchView, c: InstanceView) -> int:
    """Tokens of this request that its prefill would have to compute there."""
    return max(0, view.length_tokens - view.predictions[c.name].cached_tokens)


def lowest(view: DispatchView, loads: Callable[[DispatchView], Sequence[float]], rng: Random, unit: str) -> Decision:
    """Decide by the lowest of ``loads`` among the candidates that answered."""
    known = answered(view)
    return pick_lowest(known, loads(known), rng, unit=unit) if known.candidates else nothing(known)
