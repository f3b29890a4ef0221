"""LMetric: tokens that the prefill would compute, times the batch that would decode. No weights.

Source: arXiv 2603.15202: the product of new prefill tokens (queued ones included) and of the batch size.
"""

from __future__ import annotations

from random import Random

from millrace.policies.dispatch.view import Decision, DispatchView

from bench.policies.uncached import Parameters, State, ask, lowest, new_tokens, queued, requests

__all__ = ["Parameters", "State", "ask", "decide"]


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """The least product, this request counted in both factors."""

    def loads(known: DispatchView) -> list[float]:
        return [(queued(c) + new_tokens(known, c)) * (requests(c) + 1) for c in known.candidates]

    return lowest(view, loads, rng, "new prompt tokens x batch size"), state
