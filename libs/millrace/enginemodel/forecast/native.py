"""The fast forecast and step cost, where they are built. The only place that imports ``millrace_native``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from millrace.contracts.status import BatchComposition, SequenceStatus, StatusSnapshot
from millrace.enginemodel.forecast.moving import check_curve
from millrace.enginemodel.forecast.present import LengthRevision, cached_of
from millrace.enginemodel.forecast.question import (
    Candidate,
    Forecast,
    JoinForecast,
    LeaveForecast,
    LoadForecast,
    Placement,
    ReplicaRequest,
)
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import CostCurve, StepCost

#: Changes with the calls below; a build of another interface is of older or newer sources.
INTERFACE = 5

try:
    from millrace_native import enginemodel as _module
except ImportError:  # not built here: the reference answers
    NATIVE = False
else:
    #: Whether the compiled module is there.
    NATIVE = getattr(_module, "INTERFACE", 1) == INTERFACE


#: Parameters that the compiled module computes with, or need not know: its engine is first come first served, without a
#: prefix index, and counts blocks.
COMPILED = frozenset(
    """
    max_model_len max_sequences token_budget block_size blocks_total long_prefill_token_threshold chunked_prefill
    prefix_caching watermark reserve_full_prompt queue_policy async_scheduling segments
    """.split()
)


def compiled_for(parameters: EngineParameters) -> bool:
    """Whether the compiled module knows every parameter that is not at its default; else the reference answers."""
    default = EngineParameters()
    others = set(EngineParameters.__struct_fields__) - COMPILED
    return all(getattr(parameters, name) == getattr(default, name) for name in others)


def simulate_natively(
    requests: Sequence[ReplicaRequest], cost: StepCost, parameters: EngineParameters
) -> list[tuple[int, int]] | None:
    """First and last token of each request on one idle engine, ns; None where the compiled module cannot tell."""
    run = native_runs(cost, parameters)
    if run is None:
        return None
    return run(
        [(request.at_ns, request.prompt_tokens, request.output_tokens, request.kv_tokens) for request in requests]
    )


def native_runs(
    cost: StepCost, parameters: EngineParameters
) -> Callable[[Sequence[tuple[int, int, int, int]]], list[tuple[int, int]]] | None:
    """Runs of one idle engine, which is converted once: from (arrival ns, prompt tokens, output tokens, prompt tokens
    whose KV comes along), in order of arrival, to (first, last token ns). It raises ValueError for what the engine would refuse, and may run in several
    threads at once. None where the compiled module cannot tell.
    """
    if not NATIVE or not hasattr(_module, "simulate") or not compiled_for(parameters):
        return None
    return functools.partial(_module.simulate, _native_limits(parameters), _native_cost(cost), parameters.blocks_total)


class NativeFuture:
    """One instance in the compiled module: what ``reference.forecast`` says of it, some hundred times as fast."""

    def __init__(self, cost: StepCost, parameters: EngineParameters, lengths: LengthRevision) -> None:
        limits = _native_limits(parameters)
        self._native = _module.Forecaster(limits, _native_cost(cost), lengths.default_output_tokens)
        self.set_lengths(lengths)
        self._at_ns = 0

    def set_lengths(self, lengths: LengthRevision) -> None:
        """Revises lengths by this from the next ``load`` on. Its default is the one of the beginning."""
        self._lengths = lengths

    def load(self, snapshot: StatusSnapshot, cached: Mapping[str, int]) -> None:
        """Starts again from a snapshot, without placements."""
        running, waiting = snapshot.running, snapshot.waiting
        hits = [cached_of(status, cached) for status in waiting] if cached else None
        self._native.load(running, waiting, snapshot.blocks_free, hits, self._lengths.leave_at_tokens)
        self._at_ns = snapshot.at_ns

    def place(self, placement: Placement) -> None:
        """Adds a placement behind those added before that come at the same time."""
        candidate = placement.candidate
        self._native.place(
            placement.at_ns - self._at_ns,
            candidate.prompt_tokens,
            candidate.output_tokens,
            self._lengths.of_placement(candidate),
            candidate.sequences,
            candidate.cached_tokens,
        )

    def set_scale(self, scale: float) -> None:
        """Stretches all step times."""
        self._native.set_scale(scale)

    def forecast(self, candidate: Candidate, *, now_ns: int, with_delay: bool) -> Forecast:
        """The answer. Rolls the instance on to ``now_ns`` and keeps it there."""
        final_tokens = self._lengths.of_candidate(candidate)
        ttft, e2e, tpot_mean, tpot_worst, blocks, preemptions, others, delay = self._native.ask(
            now_ns - self._at_ns,
            candidate.prompt_tokens,
            candidate.output_tokens,
            final_tokens,
            candidate.sequences,
            candidate.cached_tokens,
            with_delay,
        )
        return Forecast(
            ttft_ns=ttft,
            e2e_ns=e2e,
            tpot_mean_ns=tpot_mean,
            tpot_worst_ns=tpot_worst,
            blocks_peak=blocks,
            preemptions=preemptions,
            others=others,
            others_delay_ns=delay,
            output_tokens=final_tokens,
        )

    def curve(self, horizon_ns: int, points: int, *, now_ns: int, blocks_total: int) -> LoadForecast:
        """The load to come. Raises ValueError for what is no curve."""
        check_curve(horizon_ns, points)
        spacing_ns = horizon_ns // (points - 1)
        rows = self._native.curve(now_ns - self._at_ns, spacing_ns, points)
        tokens, blocks, running, waiting, others, preemptions = zip(*rows, strict=True)
        return LoadForecast(
            spacing_ns=spacing_ns,
            tokens=tokens,
            blocks=blocks,
            running=running,
            waiting=waiting,
            ended=tuple(others[0] - left for left in others),
            preemptions=tuple(count - preemptions[0] for count in preemptions),
            blocks_total=blocks_total,
        )

    def leave(self, status: SequenceStatus, position: int, *, now_ns: int) -> LeaveForecast | None:
        """Forecast the gain of the other sequences if this one leaves.

        ``position``: in the snapshot, running ones first.
        """
        answer = self._native.leave(now_ns - self._at_ns, position)
        if answer is None:
            return None
        relieved_ns, preemptions_avoided, others, rest_ns = answer
        return LeaveForecast(
            relieved_ns=relieved_ns,
            preemptions_avoided=preemptions_avoided,
            others=others,
            rest_ns=rest_ns,
            rest_tokens=self._lengths.of_sequence(status) - status.output_tokens,
        )

    def join(self, candidate: Candidate, *, now_ns: int, at_ns: int) -> JoinForecast:
        """Forecast the loss of the other sequences if the candidate comes with its KV."""
        final_tokens = self._lengths.of_candidate(candidate)
        delay, preemptions, others, blocks, start, e2e, pace = self._native.join(
            now_ns - self._at_ns, at_ns - self._at_ns, candidate.prompt_tokens, candidate.output_tokens, final_tokens
        )
        return JoinForecast(
            others_delay_ns=delay,
            preemptions=preemptions,
            others=others,
            blocks_peak=blocks,
            start_ns=start,
            e2e_ns=e2e,
            pace_ns=pace,
            output_tokens=final_tokens,
        )


class NativeCost:
    """A ``StepCost`` in the compiled module. Equals it to the femtosecond."""

    def __init__(self, cost: StepCost) -> None:
        self._native = _native_cost(cost)

    def duration_fs(self, batch: BatchComposition) -> int:
        """Cost of a step."""
        return self._native.duration_fs(
            batch.decodes,
            batch.prefills,
            batch.prefill_tokens,
            batch.context_tokens,
            round(2 * batch.prefill_work),
            batch.prefill_context_tokens,
            batch.longest_context,
        )

    def run_steps(self, batch: BatchComposition, steps: int) -> int:
        """Cost of so many successive steps of decodes whose first one is ``batch``, fs, in closed form."""
        return self._native.run_steps(batch.decodes, batch.context_tokens, batch.longest_context, steps)

    def steps_until(self, batch: BatchComposition, limit_fs: int) -> int:
        """Return the number of whole steps within ``limit_fs`` of the decodes whose first step is ``batch``."""
        return self._native.steps_until(batch.decodes, batch.context_tokens, batch.longest_context, limit_fs)


def _native_limits(parameters: EngineParameters) -> _module.Limits:
    return _module.Limits(
        max_model_len=parameters.max_model_len,
        block_size=parameters.block_size,
        max_sequences=parameters.max_sequences,
        token_budget=parameters.token_budget,
        long_prefill_token_threshold=parameters.long_prefill_token_threshold,
        chunked_prefill=parameters.chunked_prefill,
        reserve_full_prompt=parameters.reserve_full_prompt,
        watermark=parameters.watermark,
        async_scheduling=parameters.async_scheduling,
    )


def _native_cost(cost: StepCost) -> _module.StepCost:
    return _module.StepCost(
        fixed=cost.fixed,
        decode=cost.decode,
        prefill_token=cost.prefill_token,
        context_token=cost.context_token,
        tail_token=cost.tail_token,
        tail_decodes=cost.tail_decodes,
        prefill_half_work=cost.prefill_half_work,
        mixed_decode=cost.mixed_decode,
        mixed_context_token=cost.mixed_context_token,
        mixed_work=cost.mixed_work,
        tokens=_curves(cost.tokens),
        sequences=_curves(cost.sequences),
        decode_context=_curves(*cost.decode_context),
        prefill_work=_curves(*cost.prefill_work),
        mixed_context=_curves(*cost.mixed_context),
        prefill_granularity=cost.prefill_granularity,
    )


def _curves(*curves: CostCurve | None) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    return [(curve.starts, curve.values_fs, curve.slopes_fs) for curve in curves if curve is not None]
