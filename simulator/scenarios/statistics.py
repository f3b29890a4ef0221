"""Figures of one scenario's outcome: latencies, throughput, goodput, preemptions, how right the predictions were."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from millrace.contracts.migration import MigrationOutcome
from millrace.policies.registry import policy_name

from simulator.scenarios.observer import EngineSample, FinishedRequest
from simulator.scenarios.running import ScenarioOutcome
from simulator.scenarios.spec import SloSpec

_NS = 1e9
Floats = npt.NDArray[np.float64]


class LatencySpread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles, seconds; nan where there is nothing."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


#: Where there is nothing.
NO_SPREAD = LatencySpread(mean=math.nan, p50=math.nan, p90=math.nan, p99=math.nan, largest=math.nan)


class ForecastErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the predictions that were made; shares are of the measured value.

    Attributes:
        absolute: Mean of the absolute errors, relative.
        bias: Mean of the signed errors, relative; above 0 where too much was predicted.
    """

    count: int
    absolute: float
    bias: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a scenario run. Requests of the warm-up are left out; failures and open calls are counted.

    Attributes:
        rate_per_s: Arrivals as they came.
        asked_per_s: Rate that the scenario asks for; nan where the times are a trace's.
        served: Completed requests that the figures are of.
        lost: Refused, failed, or still open at the end.
        requests_per_s, tokens_per_s: From the first arrival to the last end.
        goodput: Share of all requests that completed within the SLO.
        prefix_share: Prompt tokens found in prefix caches.
        prefix_error: Cached tokens predicted wrongly, per prompt token of requests with a forecast; None without.
        imbalance: Coefficient of variation of tokens over instances.
        migrations: How many ended how, the refusal behind the outcome; those of the warm-up too.
        frozen_s: Of those that moved: from the freeze to the word that the target has the sequence.
    """

    name: str
    seed: int
    policy: str
    rate_per_s: float
    served: int
    lost: int
    ttft_s: LatencySpread
    e2e_s: LatencySpread
    tpot_s: LatencySpread
    requests_per_s: float
    tokens_per_s: float
    goodput: float
    preemptions: int
    prefix_share: float
    prefix_error: float | None
    imbalance: float
    continuations: int
    fallbacks: int
    e2e_error: ForecastErrors
    ttft_error: ForecastErrors
    trace_hash: str
    messages: int
    wall_s: float
    virtual_s: float
    asked_per_s: float = math.nan
    migrations: dict[str, int] = {}
    frozen_s: LatencySpread = NO_SPREAD


def summarise(outcome: ScenarioOutcome) -> Summary:
    """All figures of an outcome."""
    spec = outcome.spec
    counted = [record for record in outcome.finished if record.number >= spec.workload.warm_up]
    done = [record for record in counted if record.outcome == "completed"]
    asked = spec.workload.count - spec.workload.warm_up
    good = sum(within(record, spec.slo) for record in done)
    span_s = _span_s(counted)
    prompt_tokens = sum(record.prompt_tokens for record in done)
    return Summary(
        name=spec.name,
        seed=spec.seed,
        policy=policy_name(spec.dispatch.policy),
        rate_per_s=_rate(outcome.finished),
        served=len(done),
        lost=asked - len(done),
        ttft_s=spread(record.ttft_ns / _NS for record in done if record.ttft_ns >= 0),
        e2e_s=spread(record.e2e_ns / _NS for record in done),
        tpot_s=spread(tpot_ns(record) / _NS for record in done if record.output_tokens > 1),
        requests_per_s=len(done) / span_s,
        tokens_per_s=sum(record.output_tokens for record in done) / span_s,
        goodput=good / asked,
        preemptions=sum(last.preemptions for last in last_samples(outcome.samples).values()),
        prefix_share=sum(record.cached_tokens for record in done) / prompt_tokens if prompt_tokens else 0.0,
        prefix_error=_prefix_error(done),
        imbalance=_imbalance(done),
        continuations=sum(record.continuations for record in done),
        fallbacks=outcome.fallbacks,
        e2e_error=_errors((record.predicted_e2e_ns, record.e2e_ns) for record in done),
        ttft_error=_errors((record.predicted_ttft_ns, record.ttft_ns) for record in done),
        trace_hash=f"{outcome.trace_hash:016x}",
        messages=outcome.messages,
        wall_s=outcome.wall_s,
        virtual_s=outcome.virtual_s,
        asked_per_s=float(getattr(spec.workload.arrivals, "rate_per_s", math.nan)),
        migrations=dict(sorted(Counter(migration.outcome for migration in outcome.migrations).items())),
        frozen_s=spread(m.frozen_ns / _NS for m in outcome.migrations if m.outcome == MigrationOutcome.MOVED),
    )


def spread(values: Iterable[float]) -> LatencySpread:
    """Mean and percentiles."""
    known = np.fromiter(values, dtype=np.float64)
    if not known.size:
        return NO_SPREAD
    p50, p90, p99 = (float(value) for value in np.percentile(known, (50, 90, 99)))
    return LatencySpread(mean=float(known.mean()), p50=p50, p90=p90, p99=p99, largest=float(known.max()))


def tpot_ns(record: FinishedRequest) -> float:
    """Mean time per output token after the first, ns."""
    return (record.e2e_ns - record.ttft_ns) / max(1, record.output_tokens - 1)


def within(record: FinishedRequest, slo: SloSpec) -> bool:
    """Whether a completed request kept every bound that is set."""
    bounds = ((record.ttft_ns, slo.ttft_ms), (tpot_ns(record), slo.tpot_ms), (record.e2e_ns, slo.e2e_ms))
    return all(not limit_ms or 0 <= value_ns <= limit_ms * 1e6 for value_ns, limit_ms in bounds)


def last_samples(samples: Sequence[EngineSample]) -> dict[str, EngineSample]:
    """The youngest sample of each instance."""
    return {sample.instance: sample for sample in samples}


def _span_s(records: list[FinishedRequest]) -> float:
    if not records:
        return math.nan
    first_ns = min(record.arrival_ns for record in records)
    return (max(record.arrival_ns + record.e2e_ns for record in records) - first_ns) / _NS


def _rate(records: list[FinishedRequest]) -> float:
    """Arrivals per second, as they came."""
    if len(records) < 2:
        return math.nan
    times = [record.arrival_ns for record in records]
    return (len(times) - 1) / ((max(times) - min(times)) / _NS or math.nan)


def _imbalance(done: list[FinishedRequest]) -> float:
    tokens: dict[str, int] = {}
    for record in done:
        tokens[record.instance] = tokens.get(record.instance, 0) + record.output_tokens + record.prompt_tokens
    values = np.array(list(tokens.values()), dtype=np.float64)
    return float(values.std() / values.mean()) if values.size else math.nan


def _prefix_error(done: Sequence[FinishedRequest]) -> float | None:
    known = [record for record in done if record.predicted_cached_tokens >= 0]
    wrong = sum(abs(record.predicted_cached_tokens - record.cached_tokens) for record in known)
    return wrong / sum(record.prompt_tokens for record in known) if known else None


def _errors(pairs: Iterable[tuple[int, int]]) -> ForecastErrors:
    """Of (predicted, measured) in ns; those without a prediction do not count."""
    relative = np.array([(predicted - real) / real for predicted, real in pairs if predicted >= 0 and real > 0])
    if not relative.size:
        return ForecastErrors(count=0, absolute=math.nan, bias=math.nan)
    return ForecastErrors(count=relative.size, absolute=float(np.abs(relative).mean()), bias=float(relative.mean()))
