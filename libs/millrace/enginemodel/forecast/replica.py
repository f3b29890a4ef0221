"""One engine under a given list of arrivals: when each request gets its first and its last token.

The same scheduler and step cost as every forecast, with nothing running at the start. Planners use it for "what latency
does one replica give at this rate".
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.contracts.status import BatchComposition, StatusSnapshot
from millrace.enginemodel.forecast.future import Future
from millrace.enginemodel.forecast.future_sequence import FutureSequence
from millrace.enginemodel.forecast.known import ForecastInput
from millrace.enginemodel.forecast.native import simulate_natively
from millrace.enginemodel.forecast.present import LengthRevision
from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost


class ServedRequest(msgspec.Struct, frozen=True, gc=False):
    """Times of a request's first and last token, ns on the clock of its arrival."""

    first_token_ns: int
    end_ns: int


def simulate_replica(
    requests: Sequence[ReplicaRequest], cost: StepCost, parameters: EngineParameters, *, native: bool = True
) -> list[ServedRequest]:
    """Serve the requests on one engine that is idle at the start.

    Args:
        requests: In order of arrival.
        native: Whether the compiled module may do it; the result is the same.

    Returns:
        One entry per request, in the order given.

    Raises:
        ValueError: a request that the engine would refuse, or arrivals out of order.
    """
    _check(requests, parameters)
    if native:
        served = simulate_natively(requests, cost, parameters)
        if served is not None:
            return [ServedRequest(first, end) for first, end in served]
    sequences = [_sequence(request, parameters.block_size) for request in requests]
    state = ForecastInput(
        snapshot=_idle(parameters), cost=cost, parameters=parameters, lengths=_lengths(parameters), now_ns=0
    )
    Future(state, sequences).run()
    return [
        ServedRequest(sequence.token_fs[0] // FS_PER_NS, sequence.token_fs[-1] // FS_PER_NS) for sequence in sequences
    ]


def _check(requests: Sequence[ReplicaRequest], parameters: EngineParameters) -> None:
    before_ns = 0
    for index, request in enumerate(requests):
        if request.at_ns < before_ns:
            raise ValueError(f"request {index} arrives at {request.at_ns} ns, before the one ahead of it")
        before_ns = request.at_ns
        total = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 1 or total > parameters.max_model_len:
            raise ValueError(
                f"request {index} of {request.prompt_tokens} + {request.output_tokens} tokens does not fit in "
                f"max_model_len = {parameters.max_model_len}"
            )
        if not 0 <= request.kv_tokens < request.prompt_tokens:
            raise ValueError(
                f"request {index} brings KV of {request.kv_tokens} of {request.prompt_tokens} prompt tokens"
            )


def _sequence(request: ReplicaRequest, block_size: int) -> FutureSequence:
    return FutureSequence(
        prompt_tokens=request.prompt_tokens,
        output_tokens=0,
        final_tokens=request.output_tokens,
        arrives_fs=request.at_ns * FS_PER_NS,
        cached_tokens=request.kv_tokens // block_size * block_size,
    )


def _idle(parameters: EngineParameters) -> StatusSnapshot:
    return StatusSnapshot(
        instance="",
        incarnation=0,
        model="",
        step=0,
        at_ns=0,
        running=[],
        waiting=[],
        blocks_free=parameters.blocks_total,
        blocks_total=parameters.blocks_total,
        preemptions=0,
        step_duration_ns=0,
        batch=BatchComposition(),
    )


def _lengths(parameters: EngineParameters) -> LengthRevision:
    return LengthRevision(default_output_tokens=1, max_model_len=parameters.max_model_len)
