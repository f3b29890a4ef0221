"""The forecast as it is meant, in plain Python. ``native/`` is held to exact agreement with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from millrace.contracts.status import StatusSnapshot
from millrace.enginemodel.forecast.future import Future, arrivals, sequences_of
from millrace.enginemodel.forecast.future_sequence import FutureSequence
from millrace.enginemodel.forecast.known import NOTHING_CACHED, ForecastInput
from millrace.enginemodel.forecast.present import LengthRevision
from millrace.enginemodel.forecast.question import Candidate, Forecast, Placement
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost


def forecast(
    snapshot: StatusSnapshot,
    candidate: Candidate,
    cost: StepCost,
    parameters: EngineParameters,
    *,
    now_ns: int,
    pending: Sequence[Placement] = (),
    default_output_tokens: int = 128,
    cached: Mapping[str, int] = NOTHING_CACHED,
) -> Forecast:
    """Rolls the instance forward with and without the candidate. ``candidate.refusal(parameters)`` must be None.

    Args:
        now_ns: When the candidate comes, unix ns.
        default_output_tokens: Assumed where no length was predicted.

    The others are the fields of ``ForecastInput``.
    """
    lengths = LengthRevision(default_output_tokens=default_output_tokens, max_model_len=parameters.max_model_len)
    state = ForecastInput(
        snapshot=snapshot,
        cost=cost,
        parameters=parameters,
        lengths=lengths,
        now_ns=now_ns,
        pending=pending,
        cached=cached,
    )
    return forecast_of(state, candidate)


def forecast_of(state: ForecastInput, candidate: Candidate) -> Forecast:
    """The same of one instance as it is known."""
    snapshot, lengths = state.snapshot, state.lengths
    output_tokens = lengths.of_candidate(candidate)
    asked = sequences_of(Placement(candidate, state.now_ns), snapshot.at_ns, final_tokens=output_tokens)
    ends = []
    for added in (asked, []):
        coming = arrivals(state.pending, snapshot.at_ns, lengths)
        placed = sorted([*coming, *added], key=lambda sequence: sequence.arrives_fs)
        future = Future(state, placed)
        future.run()
        ends.append([sequence.token_fs[-1] for sequence in (*future.present.values(), *coming)])
        if added:
            rolled = future
    others = [(later, end) for later, end in zip(*ends, strict=True) if end >= state.now_fs]
    return _measured(
        asked,
        rolled,
        others=len(others),
        others_delay_ns=sum(later - end for later, end in others) // FS_PER_NS,
        output_tokens=output_tokens,
    )


def _measured(
    asked: list[FutureSequence], future: Future, *, others: int, others_delay_ns: int, output_tokens: int
) -> Forecast:
    now_ns = asked[0].arrives_fs // FS_PER_NS
    first_fs = min(sequence.token_fs[0] for sequence in asked)
    last_fs = max(sequence.token_fs[-1] for sequence in asked)
    pauses = [later - sooner for sequence in asked for sooner, later in pairwise(sequence.token_fs)]
    steps = [step for step in future.steps if step.begin_fs >= asked[0].joined_fs and step.end_fs <= last_fs]
    return Forecast(
        ttft_ns=first_fs // FS_PER_NS - now_ns,
        e2e_ns=last_fs // FS_PER_NS - now_ns,
        tpot_mean_ns=sum(pauses) // len(pauses) // FS_PER_NS if pauses else 0,
        tpot_worst_ns=max(pauses, default=0) // FS_PER_NS,
        blocks_peak=max(step.blocks for step in steps),
        preemptions=sum(step.preempted for step in steps),
        others=others,
        others_delay_ns=others_delay_ns,
        output_tokens=output_tokens,
    )
