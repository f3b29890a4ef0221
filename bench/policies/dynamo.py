"""Dynamo's KV router: what it would prefill plus what would decode, weight 1 each, in tokens in place of blocks.

Source: Dynamo 1.6, knowledge base, router design: potential new prefill blocks (active prompt tokens and this one's
uncached ones) times ``kv-overlap-score-weight`` (1), plus potential decode blocks; temperature 0.
"""

from __future__ import annotations

from random import Random

from millrace.policies.dispatch.view import Decision, DispatchView

from bench.policies.uncached import Parameters, State, ask, lowest, new_tokens, queued

__all__ = ["Parameters", "State", "ask", "decide"]


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """The lowest cost."""

    def loads(known: DispatchView) -> list[float]:
        return [
            queued(c) + new_tokens(known, c) + c.running_tokens + c.in_flight_tokens + known.length_tokens
            for c in known.candidates
        ]

    return lowest(view, loads, rng, "tokens to prefill and to decode"), state
