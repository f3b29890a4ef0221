"""Forecasts: they say what the modelled engine then does, and their rules one by one."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from millrace.actor.engine import EngineSequence, EngineSnapshot
from millrace.contracts.status import SequenceState, SequenceStatus, StatusSnapshot
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.forecast import (
    NATIVE,
    Candidate,
    Forecast,
    Forecaster,
    forecast,
)
from millrace.enginemodel.forecast.present import LengthRevision
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost
from millrace.enginemodel.step_time_models import LinearStepTime

from tests.testbed.messages import plain_snapshot

AT_NS = 1_700_000_000_000_000_000
STEP_NS = 1000
CONSTANT = StepCost(fixed=STEP_NS * FS_PER_NS)
PARAMETERS = EngineParameters(max_model_len=128, block_size=4, blocks_total=64, max_sequences=8, token_budget=32)
NEEDS_NATIVE = pytest.mark.skipif(not NATIVE, reason="the native module is not built here (native/README.md)")


def snapshot(
    running: list[SequenceStatus] | None = None, waiting: list[SequenceStatus] | None = None, *, blocks: int = 64
) -> StatusSnapshot:
    running = running or []
    return plain_snapshot(
        "i",
        at_ns=AT_NS,
        running=running,
        waiting=waiting or [],
        blocks_free=blocks - sum(status.blocks for status in running),
        blocks_total=blocks,
        step_duration_ns=STEP_NS,
    )


def decoding(name: str, prompt: int, output: int, **changes: Any) -> SequenceStatus:
    """A running sequence that has computed all but its last token."""
    computed = prompt + output - 1
    status = SequenceStatus(name, SequenceState.RUNNING, prompt, computed, output, 100, -(-computed // 4), AT_NS, 20)
    return msgspec.structs.replace(status, **changes)


def waiting(name: str, prompt: int, **changes: Any) -> SequenceStatus:
    status = SequenceStatus(name, SequenceState.WAITING, prompt, 0, 0, 100, 0, AT_NS, 20)
    return msgspec.structs.replace(status, **changes)


def ask(state: StatusSnapshot, candidate: Candidate, **changes: Any) -> Forecast:
    return forecast(state, candidate, CONSTANT, PARAMETERS, **{"now_ns": AT_NS, **changes})


def test_an_idle_engine_starts_the_candidate_at_once() -> None:
    answer = ask(snapshot(), Candidate(prompt_tokens=10, expected_output_tokens=5), now_ns=AT_NS + 77)
    assert answer == Forecast(
        ttft_ns=STEP_NS,
        e2e_ns=5 * STEP_NS,
        tpot_mean_ns=STEP_NS,
        tpot_worst_ns=STEP_NS,
        blocks_peak=4,
        preemptions=0,
        others=0,
        others_delay_ns=0,
        output_tokens=5,
    )


def test_a_candidate_delays_a_placement_that_comes_after_it() -> None:
    cost = StepCost(fixed=STEP_NS * FS_PER_NS, prefill_token=100 * FS_PER_NS)
    forecaster = Forecaster(cost, PARAMETERS)
    forecaster.load(snapshot([waiting("a.0", 4)]))
    forecaster.add("b.0", Candidate(prompt_tokens=10, expected_output_tokens=1), AT_NS)
    forecaster.advance(AT_NS)
    # Both are computed in the second step, which costs 500 ns more for the candidate; "a" sees that too.
    answer = forecaster.forecast(Candidate(prompt_tokens=5, expected_output_tokens=1))
    assert (answer.others, answer.others_delay_ns) == (2, 1000)


def test_lengths_are_bounded_by_the_client_and_by_the_engine() -> None:
    lengths = [
        ask(snapshot(), Candidate(prompt_tokens=100, expected_output_tokens=expected, max_tokens=bound)).output_tokens
        for expected, bound in ((None, 0), (10, 0), (10, 7), (500, 0))
    ]
    assert lengths == [28, 10, 7, 28]


def test_what_an_engine_would_refuse_is_said() -> None:
    refused = [
        Candidate(prompt_tokens=0),
        Candidate(prompt_tokens=128),
        Candidate(prompt_tokens=100, output_tokens=28),
        Candidate(prompt_tokens=3, output_tokens=9, max_tokens=9),
    ]
    assert all(candidate.refusal(PARAMETERS) for candidate in refused)
    assert Candidate(prompt_tokens=127).refusal(PARAMETERS) is None


@pytest.mark.parametrize(
    ("expected", "assumed"),
    [
        (50, {0: 50, 25: 50, 26: 51, 49: 74, 50: 75, 80: 105}),  # half of the prediction more
        (6, {0: 6, 5: 8, 6: 16, 80: 90}),  # ten tokens at least, once it is outrun
    ],
)
def test_a_sequence_past_half_of_its_prediction_goes_on_for_that_half(expected: int, assumed: dict[int, int]) -> None:
    lengths = LengthRevision(default_output_tokens=1, max_model_len=1_000)
    for done, length in assumed.items():
        candidate = Candidate(prompt_tokens=1, expected_output_tokens=expected, output_tokens=done)
        assert lengths.of_candidate(candidate) == length


@pytest.mark.parametrize("seed", range(40))
def test_a_forecast_with_true_lengths_is_what_the_engine_then_does(seed: int) -> None:
    rng = random.Random(seed)
    parameters = EngineParameters(
        max_model_len=256,
        block_size=16,
        blocks_total=rng.choice((20, 40, 200)),
        max_sequences=rng.choice((4, 16)),
        token_budget=rng.choice((32, 256)),
        long_prefill_token_threshold=rng.choice((0, 24)),
        prefix_caching=False,
    )
    step_time = LinearStepTime(fixed=1000.0, per_decode=50.0, per_prefill_token=20.0, per_context_token=2.0)
    engine = ModelledEngine(parameters, step_time)
    for index in range(rng.randrange(20)):
        assert engine.add(sequence(rng, f"{index}.0")) is None
    now_ns, done = AT_NS, None
    for _ in range(rng.randrange(60)):
        done = engine.step(now_ns)
        now_ns += done[1] if done else 0
    engine.limit_step(rng.choice((0, 24, 100)))
    state = published(engine.snapshot(now_ns))
    asked = sequence(rng, "asked.0")
    candidate = Candidate(
        prompt_tokens=len(asked.prompt_token_ids), expected_output_tokens=asked.expected_output_tokens
    )
    answer = forecast(state, candidate, engine.cost, parameters, now_ns=now_ns)
    assert (answer.ttft_ns, answer.e2e_ns) == _served(engine, asked, now_ns)


@pytest.mark.parametrize("seed", range(20))
def test_with_steps_scheduled_ahead_a_candidate_starts_one_step_later(seed: int) -> None:
    rng = random.Random(f"ahead {seed}")
    parameters = EngineParameters(max_model_len=256, prefix_caching=False, async_scheduling=True)
    engine = ModelledEngine(parameters, LinearStepTime(fixed=1000.0, per_decode=50.0, per_prefill_token=20.0))
    for index in range(rng.randrange(1, 10)):
        assert engine.add(sequence(rng, f"{index}.0", output_min=20)) is None
    now_ns = AT_NS
    for _ in range(rng.randrange(2, 15)):
        done = engine.step(now_ns)
        assert done is not None
        now_ns += done[1]
    asked = sequence(rng, "asked.0")
    candidate = Candidate(
        prompt_tokens=len(asked.prompt_token_ids), expected_output_tokens=asked.expected_output_tokens
    )
    state = published(engine.snapshot(now_ns))
    answer = forecast(state, candidate, engine.cost, parameters, now_ns=now_ns + 1)
    assert answer.ttft_ns + 1 == _served(engine, asked, now_ns)[0]


def _served(engine: ModelledEngine, asked: EngineSequence, now_ns: int) -> tuple[int, int]:
    """Adds it while the next step is under way, as messages arrive; returns times of its first and last token."""
    begun_ns, times = now_ns, []
    duration_ns = engine.begin_step(now_ns)
    assert engine.add(asked) is None
    if duration_ns is not None:
        now_ns += duration_ns
        engine.complete_step(now_ns)
    while (done := engine.step(now_ns)) is not None:
        now_ns += done[1]
        times += [now_ns - begun_ns for output in done[0].outputs if output.sequence == asked.sequence]
    return times[0], times[-1]


def sequence(rng: random.Random, name: str, *, output_min: int = 1) -> EngineSequence:
    output = rng.randrange(output_min, 100)
    return EngineSequence(
        sequence=name,
        prompt_token_ids=[97] * rng.randrange(1, 150),
        sampling=Sampling(max_tokens=output, ignore_eos=True),
        expected_output_tokens=output,
    )


def published(state: EngineSnapshot) -> StatusSnapshot:
    both = set(state.__struct_fields__) & set(StatusSnapshot.__struct_fields__)
    fields = {name: getattr(state, name) for name in both}
    return StatusSnapshot(instance="i", incarnation=1, model="m", **fields)


@pytest.mark.parametrize("native", [pytest.param(True, marks=NEEDS_NATIVE), False])
def test_a_placement_counts_until_a_snapshot_shows_it_or_it_is_forgotten(native: bool) -> None:
    forecaster = Forecaster(CONSTANT, PARAMETERS, native=native)
    placed = Candidate(prompt_tokens=4, expected_output_tokens=9)
    forecaster.add("early.0", placed, AT_NS - 5)
    forecaster.load(snapshot())
    forecaster.advance(AT_NS)
    for key in ("a.0", "b", "c.1"):
        forecaster.add(key, placed, AT_NS)
    forecaster.add("refused.0", Candidate(prompt_tokens=1000), AT_NS)
    assert forecaster.forecast(placed).others == 4
    forecaster.forget("c.1")
    forecaster.forget("never.0")
    assert forecaster.placements == ["early.0", "a.0", "b"]
    forecaster.load(snapshot([decoding("a.0", 4, 1)], [waiting("b.0", 4), waiting("b.1", 4)]))
    assert forecaster.placements == ["early.0"]
    assert forecaster.forecast(placed).others == 4


@pytest.mark.parametrize("native", [pytest.param(True, marks=NEEDS_NATIVE), False])
def test_a_question_changes_nothing_and_time_may_go_back(native: bool) -> None:
    forecaster = Forecaster(CONSTANT, PARAMETERS, native=native)
    forecaster.load(snapshot([decoding("a.0", 8, 3)]))
    asked = Candidate(prompt_tokens=4, expected_output_tokens=9)
    answers = []
    for now_ns in (AT_NS + 100, AT_NS + 5500, AT_NS + 100):
        forecaster.advance(now_ns)
        answers += [forecaster.forecast(asked), forecaster.forecast(asked)]
    assert answers[0] == answers[1] == answers[4] == answers[5]
    assert (answers[0].ttft_ns, answers[2].ttft_ns) == (1900, 1500)


@pytest.mark.parametrize("native", [pytest.param(True, marks=NEEDS_NATIVE), False])
def test_a_scale_stretches_time(native: bool) -> None:
    forecaster = Forecaster(CONSTANT, PARAMETERS, native=native)
    forecaster.load(snapshot())
    forecaster.advance(AT_NS)
    asked = Candidate(prompt_tokens=4, expected_output_tokens=10)
    latencies = []
    for scale in (1.0, 1.5, 1.0):
        forecaster.set_scale(scale)
        latencies.append(forecaster.forecast(asked).e2e_ns)
    assert latencies == [10 * STEP_NS, 15 * STEP_NS, 10 * STEP_NS]
    with pytest.raises(ValueError, match="scale"):
        forecaster.set_scale(0.0)


def test_what_is_cached_of_a_prompt_is_not_computed_but_its_blocks_count() -> None:
    cold = Candidate(prompt_tokens=100, expected_output_tokens=5)  # 32 tokens a step
    warm = msgspec.structs.replace(cold, cached_tokens=96)
    answers = [ask(snapshot(), each) for each in (cold, warm)]
    assert [answer.ttft_ns for answer in answers] == [4 * STEP_NS, STEP_NS]
    assert answers[0].blocks_peak == answers[1].blocks_peak
    assert warm.refusal(PARAMETERS) is None
    assert "at least one is always computed" in str(
        msgspec.structs.replace(cold, cached_tokens=100).refusal(PARAMETERS)
    )


def test_after_a_preemption_a_cached_prompt_is_computed_again() -> None:
    state = snapshot([decoding("a", 60, 1, max_tokens=60)], blocks=20)
    parameters = msgspec.structs.replace(PARAMETERS, max_model_len=79, token_budget=9)
    cold, warm = (
        forecast(
            state,
            Candidate(prompt_tokens=13, expected_output_tokens=30, cached_tokens=cached),
            CONSTANT,
            parameters,
            now_ns=AT_NS,
        )
        for cached in (0, 12)
    )
    assert warm.preemptions == cold.preemptions == 1
    assert warm.tpot_worst_ns == cold.tpot_worst_ns, "what had been cached helps but the first time"
    assert warm.ttft_ns < cold.ttft_ns


@pytest.mark.parametrize("seed", range(20))
def test_a_forecast_that_knows_the_hits_is_what_an_engine_with_a_cache_then_does(seed: int) -> None:
    rng = random.Random(f"cached {seed}")
    parameters = EngineParameters(max_model_len=512, block_size=16, blocks_total=400, max_sequences=8, token_budget=64)
    step_time = LinearStepTime(fixed=1000.0, per_decode=50.0, per_prefill_token=20.0, per_context_token=2.0)
    engine = ModelledEngine(parameters, step_time)
    asked = sequence(rng, "asked.0")
    prompt = [rng.randrange(97, 123) for _ in range(rng.randrange(20, 200))]
    asked = msgspec.structs.replace(asked, prompt_token_ids=prompt)
    first = msgspec.structs.replace(asked, sequence="first.0", prompt_token_ids=prompt[: rng.randrange(1, 200)])
    assert engine.add(first) is None
    now_ns = AT_NS
    while (done := engine.step(now_ns)) is not None:
        now_ns += done[1]
    for index in range(rng.randrange(8)):
        other = [rng.randrange(97, 123) for _ in range(rng.randrange(1, 150))]
        assert engine.add(msgspec.structs.replace(sequence(rng, f"{index}.0"), prompt_token_ids=other)) is None
    state = published(engine.snapshot(now_ns))
    hits = min(len(first.prompt_token_ids) // 16, (len(prompt) - 1) // 16) * 16
    candidate = Candidate(
        prompt_tokens=len(prompt), expected_output_tokens=asked.expected_output_tokens, cached_tokens=hits
    )
    answer = forecast(state, candidate, engine.cost, parameters, now_ns=now_ns)
    assert (answer.ttft_ns, answer.e2e_ns) == _served(engine, asked, now_ns)
