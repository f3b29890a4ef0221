"""A step-time set against runs of a modelled engine whose noise is known."""

from __future__ import annotations

import pytest
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime
from millrace.profiling import plan
from millrace.profiling.modelled import ModelledProfile
from millrace.profiling.profile import passes
from millrace.profiling.records import Profiled, RoundRecord

from bench.step_time_cpu import check, line

TRUE = LinearStepTime(fixed=1e6, per_decode=20_000, per_prefill_token=5_000, per_context_token=100)
LIMITS = EngineParameters(max_model_len=512, max_sequences=8, token_budget=256, blocks_total=200, prefix_caching=False)
EFFORT = plan.Effort(output_tokens=12, prompt_tokens_max=1024, mixed_rounds=1)


def ran(noise: float) -> tuple[Profiled, list[list[RoundRecord]]]:
    engine = ModelledProfile("true", TRUE, LIMITS, noise=noise, seed=3)
    return engine.profiled(), passes(engine, plan.rounds(LIMITS, EFFORT, seed=1), 5, lambda done, total: None)


def test_the_right_set_of_another_pace_has_no_error_but_the_pace() -> None:
    found = check(TRUE.times(0.5), *ran(noise=0.0))

    assert found.factor == pytest.approx(2.0, rel=1e-3)
    assert (found.as_is, found.single.model) == (pytest.approx(0.5, abs=1e-3), pytest.approx(0.0, abs=1e-3))
    assert (found.single.noise, found.least.mean) == (0.0, pytest.approx(0.0, abs=1e-3))
    assert (found.mean_e2e, found.each_e2e) == (pytest.approx(0.0, abs=1e-3), pytest.approx(0.0, abs=1e-3))


def test_noise_is_told_from_the_models_own_error() -> None:
    right = check(TRUE, *ran(noise=0.1))
    wrong = check(LinearStepTime(fixed=1e5, per_decode=400_000), *ran(noise=0.1))

    assert right.single.model == pytest.approx(right.single.noise, rel=0.2)
    assert right.summed.model < right.single.model / 2
    assert wrong.single.noise == right.single.noise
    assert wrong.least.mean > 2 * right.least.mean
    assert wrong.summed.model > 2 * wrong.summed.noise


def test_a_line_of_the_table_holds_all_of_it() -> None:
    told = line("nano", "cpu-500k", check(TRUE, *ran(noise=0.1)))

    assert told.split()[:2] == ["nano", "cpu-500k"]
    assert told.count("%") == 10
