"""Coefficients of CascadeInfer's quality model, measured: closed-loop rounds, a fit, and its error.

Each round keeps B sequences of one length bucket in the engine. Of each sequence counts the normalised latency
(end-to-end latency per output token) and the means of n, sum of I, sum of I^2 and sum of L over its lifetime. Rounds of
two seeds are run: the coefficients are fitted on one, and judged on the other.

Source: CascadeInfer, section 4.1; differs in running a fixed number of sequences per round instead of a fixed time, and
in least squares of the relative error with coefficients of at least 0.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

import msgspec
from millrace.enginemodel.parameters import EngineParameters
from millrace.policies.stages.least_squares import nonnegative
from millrace.profiling.plan import batches
from millrace.profiling.records import (
    PlannedSequence,
    Profiled,
    ProfilePort,
    Round,
    RoundRecord,
)

from papers.cascadeinfer.equation1 import QualityModel

#: First bucket, tokens; each further one is twice as wide. Shorter sequences are left out.
BUCKET_MIN = 100

#: Share of a sequence that is output.
OUTPUT_SHARE = (0.1, 0.6)

#: Sequences per round beyond the first batch, which begins all at once and is not counted: twice the batch, at least
#: this many.
COUNTED_MIN = 8

#: Upper end of the share of the KV cache that a round may fill.
MEMORY_SHARE = 0.9


class SequenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that ran, with means over the steps that it was in.

    Attributes:
        latency_ns: From being added to its last token.
        normalised_latency_ns: The same per output token.
        batch_size: Sequences in the batch (n).
        prompt_tokens_sum: Of all of them (sum of I).
        prompt_tokens_squared_sum: (sum of I^2).
        context_tokens_sum: (sum of L).
    """

    prompt_tokens: int
    output_tokens: int
    latency_ns: int
    normalised_latency_ns: float
    batch_size: float
    prompt_tokens_sum: float
    prompt_tokens_squared_sum: float
    context_tokens_sum: float


def sequence_records(record: RoundRecord, *, cpu: bool = False) -> list[SequenceRecord]:
    """Return one record per sequence of a round; steps took processor time if ``cpu`` is set, else wall-clock time."""
    planned = record.round.sequences
    ends = _ends(record, cpu=cpu)
    found = []
    for index, sequence in enumerate(planned):
        steps = [number for number, step in enumerate(record.steps) if index in step.sequences]
        at_step = record.added[index] if record.added else sequence.at_step
        began = ends[at_step - 1] if at_step else 0
        latency = ends[steps[-1]] - began
        batches = [record.steps[number] for number in steps]
        prompts = [[planned[each].prompt_tokens for each in step.sequences] for step in batches]
        found.append(
            SequenceRecord(
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=sequence.output_tokens,
                latency_ns=latency,
                normalised_latency_ns=latency / sequence.output_tokens,
                batch_size=statistics.fmean([len(step.sequences) for step in batches]),
                prompt_tokens_sum=statistics.fmean([sum(each) for each in prompts]),
                prompt_tokens_squared_sum=statistics.fmean([sum(tokens**2 for tokens in each) for each in prompts]),
                context_tokens_sum=statistics.fmean([step.batch.context_tokens for step in batches]),
            )
        )
    return found


def _ends(record: RoundRecord, *, cpu: bool) -> list[int]:
    """Return the end of each step, ns from the beginning of the round."""
    ends, total = [], 0
    for step in record.steps:
        total += step.cpu_ns if cpu else step.wall_ns
        ends.append(total)
    return ends


class QualityEffort(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of measurement in a quality profile.

    Attributes:
        output_tokens_max: Of one sequence; longer ones are cut, so that rounds of long sequences end.
        batch_max: Largest batch; 0 for the engine's.
    """

    output_tokens_max: int = 128
    batch_max: int = 0


class BucketError(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the sequences whose length lies in one bucket.

    Attributes:
        length_min: Prompt plus output, tokens; the bucket ends at twice as many.
        sequences: Judged.
        error: Mean absolute relative error of the normalised latency.
        bias: Mean signed one.
        static_error: Mean absolute relative error of the global mean latency in place of the model.
    """

    length_min: int
    sequences: int
    error: float
    bias: float
    static_error: float


class QualityProfile(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found.

    Attributes:
        coefficients: Of equation 1.
        fitted: Sequences of the fit.
        judged: Sequences of the validation rounds.
        buckets: Errors on the judged ones.
    """

    profiled: Profiled
    coefficients: QualityModel
    fitted: list[SequenceRecord]
    judged: list[SequenceRecord]
    buckets: list[BucketError]

    @property
    def error(self) -> float:
        """Mean absolute relative error over all judged sequences."""
        return _mean([bucket.error for bucket in self.buckets], [bucket.sequences for bucket in self.buckets])

    @property
    def static_error(self) -> float:
        """The same of the global mean latency."""
        return _mean([bucket.static_error for bucket in self.buckets], [bucket.sequences for bucket in self.buckets])


def closed_rounds(parameters: EngineParameters, effort: QualityEffort, seed: int) -> list[Round]:
    """Rounds for each bucket and each batch size that the memory holds, in an order of the seed."""
    rng = random.Random(seed)
    planned = [
        _round(length, batch, effort, rng, seed)
        for length in buckets(parameters)
        for batch in batches(parameters)
        if _holds(length, batch, parameters) and (not effort.batch_max or batch <= effort.batch_max)
    ]
    rng.shuffle(planned)
    return planned


def buckets(parameters: EngineParameters) -> list[int]:
    """Beginnings of the buckets [100, 200), [200, 400), ... that lie within the model's length."""
    return [BUCKET_MIN << k for k in range(32) if BUCKET_MIN << (k + 1) <= parameters.max_model_len]


def run_quality(
    engine: ProfilePort,
    effort: QualityEffort,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, whole: None,
) -> QualityProfile:
    """Measures, fits and judges.

    Args:
        engine: That is measured.
        effort: How much.
        seed: Of the fitted rounds; the judged ones have the next one.
        progress: Told rounds done and rounds in all.

    Raises:
        ValueError: no bucket fits the engine.
    """
    profiled = engine.profiled()
    fitting = closed_rounds(profiled.parameters, effort, seed)
    judging = closed_rounds(profiled.parameters, effort, seed + 1)
    if not fitting:
        raise ValueError(f"no bucket fits {profiled.parameters.max_model_len} tokens and the engine's memory")
    records = []
    for number, each in enumerate([*fitting, *judging]):
        progress(number, len(fitting) + len(judging))
        records.append(counted(engine.run(each), cpu=profiled.steady_clock))
    progress(len(records), len(records))
    fitted = [record for found in records[: len(fitting)] for record in found]
    judged = [record for found in records[len(fitting) :] for record in found]
    coefficients = fit_quality(fitted)
    static_ns = sum(record.normalised_latency_ns for record in fitted) / len(fitted)
    return QualityProfile(
        profiled=profiled,
        coefficients=coefficients,
        fitted=fitted,
        judged=judged,
        buckets=bucket_errors(coefficients, judged, static_s=static_ns / 1e9),
    )


def counted(record: RoundRecord, *, cpu: bool) -> list[SequenceRecord]:
    """Sequences of a round that began in a full batch."""
    return sequence_records(record, cpu=cpu)[record.round.in_flight :]


def fit_quality(records: Sequence[SequenceRecord]) -> QualityModel:
    """Coefficients with the least relative error of the normalised latency."""
    rows = [_features(record) for record in records]
    d0, d1, d2, d3, d4 = nonnegative(rows, [record.normalised_latency_ns / 1e9 for record in records])
    return QualityModel(d0=d0, d1=d1, d2=d2, d3=d3, d4=d4)


def predicted_s(model: QualityModel, record: SequenceRecord) -> float:
    """Normalised latency of a sequence by equation 1, seconds per output token."""
    coefficients = (model.d0, model.d1, model.d2, model.d3, model.d4)
    return sum(d * f for d, f in zip(coefficients, _features(record), strict=True))


def bucket_errors(model: QualityModel, records: Sequence[SequenceRecord], *, static_s: float) -> list[BucketError]:
    """Errors by bucket, shortest first.

    Args:
        model: Is judged.
        records: It was not fitted on.
        static_s: Global mean latency of the fitted ones.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for record in records:
        measured = record.normalised_latency_ns / 1e9
        errors = predicted_s(model, record) / measured - 1, static_s / measured - 1
        found.setdefault(_bucket_of(record.prompt_tokens + record.output_tokens), []).append(errors)
    return [
        BucketError(
            length_min=length,
            sequences=len(errors),
            error=sum(abs(own) for own, _ in errors) / len(errors),
            bias=sum(own for own, _ in errors) / len(errors),
            static_error=sum(abs(static) for _, static in errors) / len(errors),
        )
        for length, errors in sorted(found.items())
    ]


def _round(length: int, batch: int, effort: QualityEffort, rng: random.Random, seed: int) -> Round:
    sequences = [_sequence(length, effort, rng) for _ in range(batch + max(COUNTED_MIN, 2 * batch))]
    return Round(name=f"closed-{length}-{batch}-{seed}", sequences=tuple(sequences), in_flight=batch)


def _sequence(length: int, effort: QualityEffort, rng: random.Random) -> PlannedSequence:
    whole = rng.randrange(length, 2 * length)
    output = max(1, min(effort.output_tokens_max, round(whole * rng.uniform(*OUTPUT_SHARE))))
    return PlannedSequence(prompt_tokens=whole - output, output_tokens=output)


def _holds(length: int, batch: int, parameters: EngineParameters) -> bool:
    """Whether the memory holds a batch of the bucket's longest sequences: preemption is not to be measured."""
    blocks = -(-2 * length // parameters.block_size)
    return batch * blocks <= MEMORY_SHARE * parameters.blocks_total


def _features(record: SequenceRecord) -> tuple[float, float, float, float, float]:
    return (
        1.0,
        record.batch_size,
        record.prompt_tokens_sum,
        record.prompt_tokens_squared_sum,
        record.context_tokens_sum,
    )


def _bucket_of(length: int) -> int:
    bucket = BUCKET_MIN
    while length >= 2 * bucket:
        bucket *= 2
    return bucket


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1, sum(weights))
