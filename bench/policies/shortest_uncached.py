"""Join the shortest queue with prefix affinity: the shipped rule, plus the tokens that its cache would not spare."""

from __future__ import annotations

from random import Random

from millrace.policies.dispatch.asking import answered
from millrace.policies.dispatch.join_shortest_queue import policy as shortest
from millrace.policies.dispatch.view import Decision, DispatchView
from millrace.policies.registry import Nothing
from msgspec.structs import replace

from bench.policies.uncached import Parameters, State, ask, new_tokens

__all__ = ["Parameters", "State", "ask", "decide"]


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """The shortest queue, this request's own part in it."""
    known = answered(view)
    joined = [replace(c, in_flight_tokens=c.in_flight_tokens + new_tokens(known, c)) for c in known.candidates]
    with_it = replace(known, candidates=tuple(joined))
    return shortest.decide(with_it, shortest.Parameters(), Nothing(), now_ns, rng)[0], state
