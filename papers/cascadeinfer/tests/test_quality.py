"""The quality profile: closed loops, the fit of D0 to D4 and its error."""

from __future__ import annotations

import itertools

import pytest
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.policies.stages.least_squares import nonnegative
from millrace.profiling.records import PlannedSequence, Round, RoundRecord, StepRecord

from papers.cascadeinfer.equation1 import QualityModel
from papers.cascadeinfer.quality import (
    QualityEffort,
    SequenceRecord,
    bucket_errors,
    buckets,
    closed_rounds,
    counted,
    fit_quality,
    predicted_s,
    run_quality,
    sequence_records,
)
from tests.testbed.modelled_profile import ModelledProfile

#: Steps whose cost is dominated by attention.
STEP = LinearStepTime(fixed=2_000_000, per_decode=20_000, per_prefill_token=2_000, per_context_token=400)
LIMITS = EngineParameters(max_model_len=1600, max_sequences=8, token_budget=512, blocks_total=600, prefix_caching=False)


def engine(*, noise: float = 0.0) -> ModelledProfile:
    return ModelledProfile("m", STEP, LIMITS, noise=noise)


def test_buckets_double_up_to_the_models_length() -> None:
    assert buckets(LIMITS) == [100, 200, 400, 800]
    assert buckets(EngineParameters(max_model_len=150)) == []


def test_rounds_fit_the_memory_and_keep_one_bucket_each() -> None:
    rounds = closed_rounds(LIMITS, QualityEffort(), seed=3)
    assert {each.in_flight for each in rounds} == {1, 2, 4, 8}
    for each in rounds:
        lengths = [s.prompt_tokens + s.output_tokens for s in each.sequences]
        assert max(lengths) < 2 * min(lengths) * 1.001
        assert each.in_flight * 2 * min(lengths) <= 1.1 * LIMITS.blocks_total * LIMITS.block_size
        assert len(each.sequences) >= 3 * each.in_flight
    assert [r.name for r in rounds] == [r.name for r in closed_rounds(LIMITS, QualityEffort(), seed=3)]
    assert all(each.in_flight <= 2 for each in closed_rounds(LIMITS, QualityEffort(batch_max=2), seed=3))


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    load = next(r for r in closed_rounds(LIMITS, QualityEffort(), seed=1) if r.in_flight == 4)
    record = engine().run(load)
    assert len(record.added) == len(load.sequences)
    first, last = {}, {}
    for number, step in enumerate(record.steps):
        for sequence in step.sequences:
            first.setdefault(sequence, number)
            last[sequence] = number
    ends = sorted(last.values())
    for index, added in enumerate(record.added):
        running = sum(1 for other in range(index) if last[other] >= added)
        assert running < 4
        if index >= 4:
            assert added - 1 in ends  # it came when one had ended
    assert len(counted(record, cpu=False)) == len(load.sequences) - 4


def test_a_latency_counts_from_the_step_at_which_the_sequence_came() -> None:
    load = next(r for r in closed_rounds(LIMITS, QualityEffort(), seed=1) if r.in_flight == 1)
    record = engine().run(load)
    whole = sum(step.wall_ns for step in record.steps)
    found = counted(record, cpu=False)
    assert sum(each.latency_ns for each in found) < whole
    assert all(each.latency_ns < whole / 4 for each in found)


def sequence(n: float, prompt: float, context: float, latency_s: float) -> SequenceRecord:
    return SequenceRecord(
        prompt_tokens=150,
        output_tokens=10,
        latency_ns=round(latency_s * 1e10),
        normalised_latency_ns=latency_s * 1e9,
        batch_size=n,
        prompt_tokens_sum=n * prompt,
        prompt_tokens_squared_sum=n * prompt * prompt,
        context_tokens_sum=n * context,
    )


def test_the_fit_finds_the_coefficients_that_made_the_latencies() -> None:
    true = QualityModel(d0=2e-3, d1=3e-5, d2=4e-8, d3=5e-11, d4=6e-8)
    records = []
    for n, prompt, context in itertools.product((1, 3, 9), (100, 400, 1600), (200, 900, 2500)):
        empty = sequence(n, prompt, context, 1.0)
        records.append(sequence(n, prompt, context, predicted_s(true, empty)))
    found = fit_quality(records)
    for name in ("d0", "d1", "d2", "d3", "d4"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6)
    errors = bucket_errors(found, records, static_s=1e-3)
    assert sum(each.sequences for each in errors) == len(records)
    assert max(each.error for each in errors) < 1e-6
    assert errors[0].static_error > 0.3


def test_coefficients_that_would_be_negative_are_left_out() -> None:
    rows = [(1.0, x, y) for x in (1.0, 2.0, 3.0) for y in (1.0, 4.0)]
    assert nonnegative(rows, [5 + 2 * x - 0.3 * y for _, x, y in rows])[2] == 0.0
    assert nonnegative(rows, [5 + 2 * x for _, x, _ in rows]) == pytest.approx([5, 2, 0], abs=1e-9)


def test_a_modelled_engine_is_predicted_and_the_global_mean_is_far_off() -> None:
    found = run_quality(engine(noise=0.02), QualityEffort(output_tokens_max=48), seed=0)
    assert found.error < 0.15
    assert found.static_error > 2 * found.error
    assert [bucket.length_min for bucket in found.buckets] == [100, 200, 400, 800]
    assert {record.prompt_tokens for record in found.fitted} != {record.prompt_tokens for record in found.judged}


def test_an_engine_without_room_for_any_bucket_is_refused() -> None:
    small = ModelledProfile("m", STEP, EngineParameters(max_model_len=150, prefix_caching=False))
    with pytest.raises(ValueError, match="no bucket fits 150 tokens"):
        run_quality(small, QualityEffort())


def test_a_sequences_record_holds_its_normalised_latency_and_mean_batch_features() -> None:
    load = Round(
        name="two",
        sequences=(
            PlannedSequence(prompt_tokens=10, output_tokens=2),
            PlannedSequence(prompt_tokens=20, output_tokens=1, at_step=1),
        ),
    )
    steps = [
        _step(BatchComposition(prefills=1, prefill_tokens=10, context_tokens=10), sequences=(0,), wall_ns=100),
        _step(BatchComposition(decodes=1, prefills=1, context_tokens=31), sequences=(0, 1), wall_ns=300),
    ]

    first, second = sequence_records(RoundRecord(round=load, steps=steps))

    assert (first.latency_ns, first.normalised_latency_ns) == (400, 200.0)
    assert (second.latency_ns, second.normalised_latency_ns) == (300, 300.0)
    assert (first.batch_size, first.prompt_tokens_sum) == (1.5, (10 + 30) / 2)
    assert first.prompt_tokens_squared_sum == (100 + 500) / 2
    assert (first.context_tokens_sum, second.context_tokens_sum) == (20.5, 31.0)


def _step(batch: BatchComposition, *, sequences: tuple[int, ...] = (0,), wall_ns: int = 1) -> StepRecord:
    return StepRecord(batch=batch, sequences=sequences, wall_ns=wall_ns, cpu_ns=1)
