"""Load curves, and what a sequence that goes or comes does to the others: rules one by one, and against the engine."""

import random

import pytest
from millrace.actor.engine import EngineSequence
from millrace.contracts.status import EngineSnapshot, StatusSnapshot
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.forecast.forecaster import Forecaster
from millrace.enginemodel.forecast.question import Candidate, JoinForecast, LoadForecast
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost
from millrace.enginemodel.step_time_models import LinearStepTime

from tests.unit.forecast_states import AT_NS, CONSTANT, PARAMETERS, STEP_NS, decoding, published, snapshot

PER_DECODE = StepCost(fixed=STEP_NS * FS_PER_NS, decode=100 * FS_PER_NS)


def at(
    state: StatusSnapshot, *, cost: StepCost = CONSTANT, parameters: EngineParameters = PARAMETERS, now_ns: int = 0
) -> Forecaster:
    forecaster = Forecaster(cost, parameters)
    forecaster.load(state)
    forecaster.advance(AT_NS + now_ns)
    return forecaster


def test_a_curve_tells_tokens_blocks_and_ends_at_even_moments() -> None:
    forecaster = at(
        snapshot([decoding("a.0", 8, 3, expected_output_tokens=5), decoding("b.0", 4, 1, expected_output_tokens=4)])
    )
    assert forecaster.curve(4000, 5) == LoadForecast(
        spacing_ns=1000,
        tokens=(14, 16, 18, 7, 0),
        blocks=(4, 5, 5, 2, 0),
        running=(2, 2, 2, 1, 0),
        waiting=(0, 0, 0, 0, 0),
        ended=(0, 0, 0, 1, 2),
        preemptions=(0, 0, 0, 0, 0),
        blocks_total=64,
    )


def test_sequences_leave_at_the_boundary_of_their_stage_and_those_beyond_it_stay() -> None:
    state = snapshot([decoding("a.0", 8, 3), decoding("beyond.0", 30, 2)])
    forecaster = at(state)
    assert forecaster.curve(30_000, 4).ended == (0, 0, 2, 2)
    forecaster.set_leave_at(16)  # "a" is 11 long and has 5 steps left until then
    left, stays = forecaster.leave("a.0"), forecaster.leave("beyond.0")
    assert (left.rest_ns, left.rest_tokens) == (5000, 5)
    assert stays.rest_tokens == 18
    forecaster.add("b.0", Candidate(prompt_tokens=10, expected_output_tokens=20), AT_NS)
    assert forecaster.curve(8000, 2).ended == (0, 2)  # a placement leaves as well
    assert forecaster.forecast(Candidate(prompt_tokens=10, expected_output_tokens=20)).output_tokens == 20
    forecaster.set_leave_at(0)
    assert forecaster.curve(8000, 2).ended == (0, 0)


@pytest.mark.parametrize(("horizon_ns", "points"), [(-1, 16), (1000, 1), (1000, 10**6)])
def test_what_is_no_curve_is_refused(horizon_ns: int, points: int) -> None:
    with pytest.raises(ValueError, match="curve"):
        at(snapshot()).curve(horizon_ns, points)


def test_who_is_not_there_or_has_ended_cannot_leave() -> None:
    state = snapshot([decoding("a.0", 8, 3, expected_output_tokens=5)])
    assert at(state).leave("b.0") is None
    assert at(state, now_ns=2000).leave("a.0") is not None
    assert at(state, now_ns=2001).leave("a.0") is None
    assert at(snapshot([decoding("full.0", 8, 100)])).leave("full.0") is None


def test_one_that_comes_with_its_kv_computes_one_token_in_its_first_step() -> None:
    forecaster = at(snapshot(), now_ns=77)
    comer = Candidate(prompt_tokens=40, output_tokens=24, expected_output_tokens=26, max_tokens=26)
    assert forecaster.join(comer) == JoinForecast(
        others_delay_ns=0,
        preemptions=0,
        others=0,
        blocks_peak=17,
        start_ns=0,
        e2e_ns=2 * STEP_NS,
        pace_ns=STEP_NS,
        output_tokens=26,
    )
    assert forecaster.join(comer, at_ns=AT_NS + 10_077).e2e_ns == 12 * STEP_NS


def test_one_that_comes_slows_the_others_while_it_is_there() -> None:
    state = snapshot([decoding("a.0", 8, 3, expected_output_tokens=23)])
    comer = Candidate(prompt_tokens=8, output_tokens=4, expected_output_tokens=9)
    answer = at(state, cost=PER_DECODE, now_ns=100).join(comer)
    assert (answer.start_ns, answer.e2e_ns, answer.pace_ns) == (1000, 1000 + 5 * 1200, 1200)
    assert (answer.others, answer.others_delay_ns, answer.preemptions) == (1, 500, 0)


def test_one_that_comes_waits_for_blocks_and_preempts_nobody_to_get_them() -> None:
    state = snapshot([decoding(f"{i}.0", 60, 2, expected_output_tokens=7) for i in range(2)], blocks=34)
    comer = Candidate(prompt_tokens=40, output_tokens=2, expected_output_tokens=7)
    answer = at(state).join(comer)
    assert (answer.start_ns, answer.preemptions, answer.others_delay_ns) == (5 * STEP_NS, 0, 0)


@pytest.mark.parametrize("seed", range(30))
def test_what_leaving_relieves_is_what_the_engine_then_does(seed: int) -> None:
    """The same engine twice: once the sequence is cancelled at the end of the step under way."""
    rng = random.Random(seed)
    names = [f"{index}.0" for index in range(rng.randrange(3, 20))]
    begun = rng.randrange(5, 40)
    engines, states = zip(*(engine_with(seed, names, begun) for _ in range(2)), strict=True)
    state = published(states[0])
    here = [status.sequence for status in (*state.running, *state.waiting)]
    assert len(here) >= 2, "a seed whose sequences have all ended shows nothing"
    leaver = rng.choice(here)
    forecaster = Forecaster(engines[0].cost, engines[0].parameters)
    forecaster.load(state)
    forecaster.advance(state.at_ns)
    answer = forecaster.leave(leaver)
    stays = ends_of(engines[0], state.at_ns)
    goes = ends_of(engines[1], state.at_ns, cancelled=leaver)
    others = [name for name in here if name != leaver]
    relieved_ns = sum(stays[name] - goes[name] for name in others)
    assert answer.relieved_ns == pytest.approx(relieved_ns, abs=len(others))  # the engine rounds each step
    assert answer.rest_ns == pytest.approx(stays[leaver] - state.at_ns, abs=1)
    assert answer.preemptions_avoided == engines[0].snapshot(0).preemptions - engines[1].snapshot(0).preemptions


def engine_with(seed: int, names: list[str], begun: int) -> tuple[ModelledEngine, EngineSnapshot]:
    rng = random.Random(f"engine {seed}")
    parameters = EngineParameters(
        max_model_len=256,
        block_size=16,
        blocks_total=rng.choice((20, 40, 200)),
        max_sequences=rng.choice((4, 16)),
        token_budget=rng.choice((32, 256)),
        prefix_caching=False,
    )
    engine = ModelledEngine(
        parameters, LinearStepTime(fixed=1000.0, per_decode=50.0, per_prefill_token=20.0, per_context_token=2.0)
    )
    for name in names:
        output = rng.randrange(10, 100)
        asked = EngineSequence(
            sequence=name,
            prompt_token_ids=[97] * rng.randrange(1, 150),
            sampling=Sampling(max_tokens=output, ignore_eos=True),
            expected_output_tokens=output,
        )
        assert engine.add(asked) is None
    now_ns = AT_NS
    for _ in range(begun):
        done = engine.step(now_ns)
        now_ns += done[1] if done else 0
    return engine, engine.snapshot(now_ns)


def ends_of(engine: ModelledEngine, now_ns: int, *, cancelled: str = "") -> dict[str, int]:
    """Return the time at which each sequence has its last token; ``cancelled`` goes after one step."""
    ends: dict[str, int] = {}
    while (done := engine.step(now_ns)) is not None:
        now_ns += done[1]
        ends |= {output.sequence: now_ns for output in done[0].outputs}
        if cancelled:
            engine.cancel([cancelled])
            cancelled = ""
    return ends
