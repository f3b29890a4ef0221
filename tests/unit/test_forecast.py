"""Forecasts: they say what the modelled engine then does, and their rules one by one."""

import random
from itertools import pairwise

import msgspec
import pytest
from millrace.actor.engine import EngineSequence, EngineStepped
from millrace.contracts.predictor import Forecast
from millrace.contracts.status import StatusSnapshot
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.forecast.forecaster import Forecaster
from millrace.enginemodel.forecast.present import LengthRevision
from millrace.enginemodel.forecast.question import Candidate
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import StepCost
from millrace.enginemodel.step_time_models import LinearStepTime

from tests.unit.forecast_states import (
    AT_NS,
    CONSTANT,
    PARAMETERS,
    STEP_NS,
    decoding,
    grouped,
    published,
    random_cost,
    random_parameters,
    snapshot,
    waiting,
)


def ask(
    state: StatusSnapshot,
    candidate: Candidate,
    cost: StepCost = CONSTANT,
    parameters: EngineParameters = PARAMETERS,
    *,
    now_ns: int = AT_NS,
) -> Forecast:
    forecaster = Forecaster(cost, parameters)
    forecaster.load(state)
    forecaster.advance(now_ns)
    return forecaster.forecast(candidate)


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


class Costing:
    """A step-time model that is a cost of any form."""

    def __init__(self, cost: StepCost) -> None:
        self.exact = cost

    def cost(self, parameters: EngineParameters) -> StepCost:
        return self.exact


@pytest.mark.parametrize("seed", range(90))
def test_a_forecast_with_true_lengths_is_what_the_engine_then_does(seed: int) -> None:
    """Beside two engines in the same state: one takes the candidate, and a placement before it, the other does not."""
    rng = random.Random(seed)
    parameters, cost = random_parameters(rng), random_cost(rng)
    if seed >= 60:
        parameters = grouped(parameters, rng)
    sequences = [sequence(rng, f"{index}.0", total=parameters.max_model_len) for index in range(rng.choice((0, 5, 20)))]
    steps, limit = rng.randrange(60), rng.choice((0, 0, 24, 100))
    engines, state = [], snapshot()
    for _ in range(2):
        engine, now_ns = ModelledEngine(parameters, Costing(cost)), AT_NS
        for each in sequences:
            assert engine.add(each) is None
        for _ in range(steps):
            done = engine.step(now_ns)
            now_ns += done[1] if done else 0
        engine.limit_step(limit)
        state = published(engine.snapshot(now_ns))
        engines.append(engine)
    before, asked = [sequence(rng, name, total=parameters.max_model_len) for name in ("placed.0", "asked.0")]
    placed = [before] * rng.randrange(2)
    forecaster = Forecaster(cost, parameters)
    forecaster.load(state)
    for each in placed:
        forecaster.add(each.sequence, candidate_of(each), now_ns)
    forecaster.advance(now_ns)
    answer = forecaster.forecast(candidate_of(asked))
    assert forecaster.forecast(candidate_of(asked), with_delay=False) == msgspec.structs.replace(
        answer, others_delay_ns=0
    )
    preempted = state.preemptions
    without, with_ = (
        _tokens(each, more, now_ns) for each, more in zip(engines, (placed, [*placed, asked]), strict=True)
    )
    others = [name for name in with_ if name != "asked.0"]
    assert answer.others == len(others)
    first_ns, last_ns = with_["asked.0"][0] - now_ns, with_["asked.0"][-1] - now_ns
    # The engine rounds each step to a nanosecond and carries the rest over from before the snapshot.
    assert (answer.ttft_ns, answer.e2e_ns) == pytest.approx((first_ns, last_ns), abs=2)
    delay_ns = sum(with_[name][-1] - without[name][-1] for name in others)
    assert answer.others_delay_ns == pytest.approx(delay_ns, abs=2 * len(others) + 1)
    pauses = [later - sooner for sooner, later in pairwise(with_["asked.0"])]
    assert answer.tpot_worst_ns == pytest.approx(max(pauses, default=0), abs=2)
    if last_ns == max(times[-1] for times in with_.values()) - now_ns and not preempted:
        assert answer.preemptions == engines[1].snapshot(0).preemptions


def _tokens(engine: ModelledEngine, more: list[EngineSequence], now_ns: int) -> dict[str, list[int]]:
    """Times at which each sequence gets its tokens if these come while the next step is under way, as messages do."""
    duration_ns = engine.begin_step(now_ns)
    assert [engine.add(each) for each in more] == [None] * len(more)
    times: dict[str, list[int]] = {}
    if duration_ns is not None:
        now_ns += duration_ns
        note(times, engine.complete_step(now_ns), now_ns)
    while (done := engine.step(now_ns)) is not None:
        now_ns += done[1]
        note(times, done[0], now_ns)
    return times


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
        now_ns += done[1]
    asked = sequence(rng, "asked.0")
    state = published(engine.snapshot(now_ns))
    answer = ask(state, candidate_of(asked), engine.cost, parameters, now_ns=now_ns + 1)
    assert answer.ttft_ns + 1 == _tokens(engine, [asked], now_ns)[asked.sequence][0] - now_ns


def note(times: dict[str, list[int]], stepped: EngineStepped, now_ns: int) -> None:
    for output in stepped.outputs:
        times.setdefault(output.sequence, []).append(now_ns)


def candidate_of(each: EngineSequence) -> Candidate:
    return Candidate(prompt_tokens=len(each.prompt_token_ids), expected_output_tokens=each.expected_output_tokens)


def sequence(rng: random.Random, name: str, *, output_min: int = 1, total: int = 250) -> EngineSequence:
    output = rng.randrange(output_min, min(100, total // 2))
    return EngineSequence(
        sequence=name,
        prompt_token_ids=[97] * rng.randrange(1, min(150, total - output)),
        sampling=Sampling(max_tokens=output, ignore_eos=True),
        expected_output_tokens=output,
    )


def test_a_placement_counts_until_a_snapshot_shows_it_or_it_is_forgotten() -> None:
    forecaster = Forecaster(CONSTANT, PARAMETERS)
    placed = Candidate(prompt_tokens=4, expected_output_tokens=9)
    forecaster.add("early.0", placed, AT_NS - 5)
    forecaster.load(snapshot())
    forecaster.advance(AT_NS)
    for key in ("a.0", "b", "c.1"):
        forecaster.add(key, placed, AT_NS)
    forecaster.add("refused.0", Candidate(prompt_tokens=1000), AT_NS)
    assert forecaster.forecast(placed).others == 4
    for key in ("c.1", "never.0"):
        forecaster.forget(key)
    assert (list(forecaster._placements), forecaster.forecast(placed).others) == (["early.0", "a.0", "b"], 3)
    forecaster.load(snapshot([decoding("a.0", 4, 1)], [waiting("b.0", 4), waiting("b.1", 4)]))
    assert list(forecaster._placements) == ["early.0"]
    assert forecaster.forecast(placed).others == 4


def test_a_question_changes_nothing_and_time_may_go_back() -> None:
    forecaster = Forecaster(CONSTANT, PARAMETERS)
    forecaster.load(snapshot([decoding("a.0", 8, 3)]))
    asked = Candidate(prompt_tokens=4, expected_output_tokens=9)
    answers = []
    for now_ns in (AT_NS + 100, AT_NS + 5500, AT_NS + 100):
        forecaster.advance(now_ns)
        answers += [forecaster.forecast(asked), forecaster.forecast(asked)]
    assert answers[0] == answers[1] == answers[4] == answers[5]
    assert (answers[0].ttft_ns, answers[2].ttft_ns) == (1900, 1500)


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
        ask(state, Candidate(prompt_tokens=13, expected_output_tokens=30, cached_tokens=cached), CONSTANT, parameters)
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
    answer = ask(state, candidate, engine.cost, parameters, now_ns=now_ns)
    times = _tokens(engine, [asked], now_ns)[asked.sequence]
    assert (answer.ttft_ns, answer.e2e_ns) == (times[0] - now_ns, times[-1] - now_ns)
