"""SGLang's cache-aware rule: the longest prefix while loads are balanced, else the fewest requests.

Source: SGLang's gateway, ``cache_aware`` with its defaults: unbalanced where the loads differ by more than 64 requests
and by more than 1.5 times; a prefix counts from 0.3 of the prompt on; a prompt without one goes to the smallest tree.
"""

from __future__ import annotations

from random import Random

import msgspec
from millrace.policies.dispatch.view import Decision, DispatchView

from bench.policies.uncached import Parameters, ask, lowest, new_tokens, requests

__all__ = ["Parameters", "State", "ask", "decide"]

CACHE_THRESHOLD, ABSOLUTE, RELATIVE = 0.3, 64, 1.5


class State(msgspec.Struct, frozen=True):
    """Attributes: trees: Tokens sent to each instance that were not in its tree."""

    trees: dict[str, int] = {}


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """One of the three, and this prompt in the chosen one's tree."""

    def loads(known: DispatchView) -> list[float]:
        counts = [float(requests(c)) for c in known.candidates]
        if max(counts) - min(counts) > ABSOLUTE and max(counts) > RELATIVE * min(counts):
            return counts
        news = [float(new_tokens(known, c)) for c in known.candidates]
        if min(news) < (1 - CACHE_THRESHOLD) * known.length_tokens:
            return news
        return [float(state.trees.get(c.name, 0)) for c in known.candidates]

    decision = lowest(view, loads, rng, "requests, new tokens or tokens in its tree")
    if decision.chosen is None:
        return decision, state
    (chosen,) = (c for c in view.candidates if c.name == decision.chosen)
    size = state.trees.get(chosen.name, 0) + new_tokens(view, chosen)
    return decision, State(trees={**state.trees, chosen.name: size})
