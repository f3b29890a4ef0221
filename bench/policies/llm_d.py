"""llm-d's scorers with the weights that ship: queue 2, KV memory 2, prefix 3; the highest sum.

Source: the endpoint picker's default profile (queue-scorer, kv-cache-utilization-scorer, prefix-cache-scorer). Queue:
1 for the shortest queue, 0 for the longest, 1 for all where equal; memory: the free share; prefix: the matched share.
"""

from __future__ import annotations

from random import Random

from millrace.policies.dispatch.view import Decision, DispatchView

from bench.policies.uncached import Parameters, State, ask, lowest, new_tokens

__all__ = ["Parameters", "State", "ask", "decide"]

QUEUE, MEMORY, PREFIX = 2.0, 2.0, 3.0


def decide(
    view: DispatchView, parameters: Parameters, state: State, now_ns: int, rng: Random
) -> tuple[Decision, State]:
    """The highest weighted sum."""

    def loads(known: DispatchView) -> list[float]:
        queues = [c.waiting + c.in_flight_sequences for c in known.candidates]
        least, width = min(queues), max(queues) - min(queues)
        return [
            -QUEUE * (1 - (queue - least) / width if width else 1.0)
            - MEMORY * (1 - c.used_tokens / c.total_tokens if c.total_tokens else 0.0)
            - PREFIX * (1 - new_tokens(known, c) / max(1, known.length_tokens))
            for c, queue in zip(known.candidates, queues, strict=True)
        ]

    return lowest(view, loads, rng, "of 7 points lost"), state
