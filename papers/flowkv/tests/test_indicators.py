"""FlowKV's indicators over a window."""

from __future__ import annotations

import math

import msgspec
import pytest
from millrace.contracts.status import EngineTotals, InstanceSummary, LoadIndicators, PhaseQueues
from millrace.policies.stages.instance import InstanceModel

from papers.flowkv.indicators import (
    PREFILL_TERMS,
    Indicators,
    InstanceLimits,
    indicators_of,
    sample_of,
    score,
)
from tests.testbed.messages import plain_summary

S = 1_000_000_000
MODEL = InstanceModel(
    fixed_s=0.01,
    per_decode_s=1e-4,
    per_context_token_s=1e-7,
    per_prefill_token_s=1e-4,
    kv_tokens=100_000.0,
    max_sequences=128.0,
)
LIMITS = InstanceLimits(max_sequences=10, token_budget=100)


def summary(at_s: float, *, steps: int = 0, waiting: int = 0) -> InstanceSummary:
    totals = EngineTotals(steps, steps * S // 10, 2 * steps, 30 * steps, 100 * steps)
    return plain_summary(
        "w",
        at_ns=round(at_s * S),
        running=2,
        waiting=waiting,
        running_tokens=300,
        blocks_free=60,
        indicators=LoadIndicators(PhaseQueues(1, waiting, 0, 0), PhaseQueues(1, 0, 1, 1), 70, 2 * S, 20, totals),
    )


def found(*bodies: InstanceSummary, model: InstanceModel | None = None) -> Indicators:
    samples = [sample for body in bodies if (sample := sample_of(body)) is not None]
    return indicators_of(samples, LIMITS, model)


def test_indicators_are_means_and_rates_over_the_window() -> None:
    told = found(summary(0, waiting=0), summary(1, steps=4, waiting=4), summary(2, steps=8, waiting=8))
    assert told.waiting_prefill == pytest.approx(0.4)
    assert (told.running_prefill, told.preempted_decode, told.moving_decode) == pytest.approx((0.1, 0.1, 0.1))
    assert told.busy == pytest.approx(8 * 0.1 / 2)
    assert told.budget == pytest.approx(32 / 100)
    assert told.kv == pytest.approx(0.4)
    assert (told.prefill_tokens_per_s, told.decodes_per_s) == pytest.approx((120, 8))
    assert told.step_s == pytest.approx(0.1)
    assert (told.longest_wait_s, told.prefill_tokens_left, told.moving) == (2.0, 70, 1)


def test_totals_that_go_back_give_no_negative_rates() -> None:
    told = found(summary(0, steps=9), summary(1, steps=1))
    assert (told.prefill_tokens_per_s, told.busy, told.step_s) == (0.0, 0.0, 0.0)


def test_memory_bandwidth_is_from_the_step_model() -> None:
    modelled = found(summary(0), summary(1, steps=4), model=MODEL).memory
    assert modelled == pytest.approx(4 * 0.01 + 8 * 1e-4 + 400 * 1e-7)
    assert found(summary(0), summary(1, steps=4)).memory == 0.0


def test_without_samples_nothing_is_loaded() -> None:
    assert indicators_of([], LIMITS, MODEL) == Indicators()


@pytest.mark.parametrize(
    "load",
    [
        LoadIndicators(prefill_tokens_left=-1),
        LoadIndicators(PhaseQueues(running=-3)),
        LoadIndicators(totals=EngineTotals(busy_ns=-5)),
        None,
    ],
)
def test_absurd_indicators_are_no_sample(load: LoadIndicators | None) -> None:
    assert sample_of(msgspec.structs.replace(summary(0), indicators=load)) is None


def test_a_score_leaves_out_what_is_no_number() -> None:
    broken = Indicators(waiting_prefill=math.nan, running_prefill=0.5)
    assert score(broken, PREFILL_TERMS, (2.0, 1.0, 0, 0, 0, 0, 0, 0)) == 1.0
