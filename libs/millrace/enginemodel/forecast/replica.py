"""One engine under a given list of arrivals: when each request gets its first and its last token.

The same scheduler and step cost as every forecast, with nothing running at the start. Planners use it for "what latency
does one replica give at this rate".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec

from millrace.enginemodel.forecast.native import native_cost, native_limits
from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import StepCost
from millrace.native import enginemodel

#: Arrival ns, prompt tokens, output tokens, prompt tokens whose KV comes along.
ReplicaRow = tuple[int, int, int, int]


class ServedRequest(msgspec.Struct, frozen=True, gc=False):
    """Times of a request's first and last token, ns on the clock of its arrival."""

    first_token_ns: int
    end_ns: int


def replica_runs(
    cost: StepCost, parameters: EngineParameters
) -> Callable[[Sequence[ReplicaRow]], list[tuple[int, int]]]:
    """Runs of one idle engine, which is converted once: from rows in order of arrival to (first, last token ns).

    The function raises ValueError for what the engine would refuse, and may run in several threads at once.
    """
    return functools.partial(
        enginemodel.simulate, native_limits(parameters), native_cost(cost), parameters.blocks_total
    )


def simulate_replica(
    requests: Sequence[ReplicaRequest], cost: StepCost, parameters: EngineParameters
) -> list[ServedRequest]:
    """Serve the requests, which are in order of arrival, on one engine that is idle at the start.

    Raises ValueError: a request that the engine would refuse, or arrivals out of order.
    """
    rows = [(each.at_ns, each.prompt_tokens, each.output_tokens, each.kv_tokens) for each in requests]
    return [ServedRequest(*times) for times in replica_runs(cost, parameters)(rows)]
