"""The compiled forecast equals the reference exactly, on random states and over random histories."""

from __future__ import annotations

import random

import msgspec
import pytest
from millrace.contracts.status import BatchComposition, SequenceStatus
from millrace.enginemodel.forecast import NATIVE, Forecaster, forecast
from millrace.enginemodel.forecast.native import NativeCost
from millrace.enginemodel.forecast.scaling import scaled
from millrace.enginemodel.step_cost import after

from tests.unit.forecast_states import (
    AT_NS,
    Case,
    random_cached,
    random_candidate,
    random_case,
    random_cost,
    random_moment,
    random_snapshot,
)

if not NATIVE:
    pytest.skip("the native module is not built here (native/README.md)", allow_module_level=True)

#: 25 times this many random states are compared.
STATES = 40


def loaded(case: Case, *, native: bool) -> Forecaster:
    forecaster = Forecaster(case.cost, case.parameters, native=native)
    forecaster.load(case.snapshot, case.cached)
    for index, placement in enumerate(case.pending):
        forecaster.add(f"pending{index}.0", placement.candidate, placement.at_ns)
    forecaster.advance(case.now_ns)
    return forecaster


@pytest.mark.parametrize("chunk", range(25))
def test_every_field_of_a_forecast_is_equal(chunk: int) -> None:
    for seed in range(chunk * STATES, (chunk + 1) * STATES):
        case = random_case(seed)
        expected = forecast(
            case.snapshot,
            case.candidate,
            case.cost,
            case.parameters,
            now_ns=case.now_ns,
            pending=case.pending,
            cached=case.cached,
        )
        fast = loaded(case, native=True)
        assert fast.forecast(case.candidate) == expected, f"seed {seed}"
        assert fast.forecast(case.candidate) == expected, f"seed {seed}, asked again"
        without = msgspec.structs.replace(expected, others_delay_ns=0)
        assert fast.forecast(case.candidate, with_delay=False) == without, f"seed {seed}, without delay"


def test_the_random_states_reach_what_is_rare() -> None:
    cases = [random_case(seed) for seed in range(300)]
    answers = [loaded(case, native=True).forecast(case.candidate) for case in cases]
    assert sum(answer.preemptions > 0 for answer in answers) > 30
    assert sum(answer.others_delay_ns > 0 for answer in answers) > 60
    assert sum(answer.others_delay_ns < 0 for answer in answers) > 0
    assert sum(case.cost.tail_token > 0 for case in cases) > 60
    assert sum(bool(case.cost.decode_context) for case in cases) > 60
    beside_prompts = [case for case in cases if _came(case) and any(map(_prompt_left, case.snapshot.running))]
    assert len(beside_prompts) > 15


def _came(case: Case) -> bool:
    return any(status.computed_tokens and status.blocks for status in case.snapshot.waiting)


def _prompt_left(status: SequenceStatus) -> bool:
    return status.computed_tokens < status.prompt_tokens - 1


@pytest.mark.parametrize("seed", range(60))
def test_a_history_of_questions_and_changes_gives_equal_answers(seed: int) -> None:
    rng = random.Random(f"history {seed}")
    case = random_case(rng.randrange(10**9))
    both = [Forecaster(case.cost, case.parameters, native=native) for native in (True, False)]
    now_ns = AT_NS
    for forecaster in both:
        forecaster.load(case.snapshot)
    for number in range(12):
        act = rng.choice(("load", "add", "add", "forget", "advance", "advance", "advance", "scale"))
        candidate, moment = random_candidate(rng, case.parameters), now_ns - rng.choice((0, 0, 10**5, 10**9))
        snapshot = msgspec.structs.replace(random_snapshot(rng, case.parameters), at_ns=moment)
        cached = random_cached(rng, snapshot)
        key, scale = f"added{rng.randrange(number + 1)}.0", rng.choice((1.0, 0.5, 1.3))
        now_ns += random_moment(rng) - AT_NS if act == "advance" else 0
        for forecaster in both:
            if act == "load":
                forecaster.load(snapshot, cached)
            elif act == "add":
                forecaster.add(key, candidate, moment)
            elif act == "forget":
                forecaster.forget(key)
            elif act == "scale":
                forecaster.set_scale(scale)
            forecaster.advance(now_ns)
        asked = random_candidate(rng, case.parameters)
        fast, plain = (forecaster.forecast(asked) for forecaster in both)
        assert fast == plain, f"after {act}, number {number}"


@pytest.mark.parametrize("seed", range(40))
def test_step_costs_and_sums_over_runs_are_equal(seed: int) -> None:
    rng = random.Random(f"cost {seed}")
    plain = scaled(random_cost(rng), rng.choice((1.0, 0.77)))
    fast = NativeCost(plain)
    for _ in range(30):
        decodes, context = rng.randrange(1, 40), rng.randrange(1, 5000)
        mixed = BatchComposition(
            decodes=rng.randrange(40),
            prefills=rng.randrange(5),
            prefill_tokens=rng.randrange(300),
            context_tokens=context,
            prefill_work=rng.randrange(50_000) / 2,
            prefill_context_tokens=rng.randrange(context),
            longest_context=rng.randrange(1000),
        )
        assert fast.duration_fs(mixed) == plain.duration_fs(mixed)
        run = BatchComposition(
            decodes=decodes, context_tokens=context, longest_context=rng.choice((0, rng.randrange(1, 300)))
        )
        steps = rng.randrange(60)
        whole = plain.decode_run_fs(run, steps)
        assert fast.run_steps(run, steps) == whole
        assert fast.steps_until(run, whole) == steps
        assert fast.steps_until(run, whole + plain.duration_fs(after(run, steps)) - 1) == steps


def test_sums_past_sixty_four_bits_are_exact() -> None:
    plain = random_cost(random.Random(3))
    cost = msgspec.structs.replace(plain, fixed=10**18, tokens=None, decode_context=())
    run = BatchComposition(decodes=2, context_tokens=10)
    assert NativeCost(cost).run_steps(run, 50) == cost.decode_run_fs(run, 50) > 2**65
    assert NativeCost(cost).steps_until(run, cost.decode_run_fs(run, 50)) == 50


@pytest.mark.parametrize("native", [True, False])
def test_a_snapshot_that_no_engine_can_have_is_refused_and_the_next_one_is_taken(native: bool) -> None:
    case = random_case(7)
    forecaster = Forecaster(case.cost, case.parameters, native=native)
    with pytest.raises(ValueError, match="blocks_free"):
        forecaster.load(msgspec.structs.replace(case.snapshot, blocks_free=-1))
    assert not forecaster.loaded
    forecaster.load(case.snapshot)
    forecaster.advance(AT_NS + 1)
    assert forecaster.forecast(case.candidate).e2e_ns > 0


def test_a_candidate_that_would_never_end_is_refused() -> None:
    case = random_case(7)
    forecaster = Forecaster(case.cost, case.parameters, native=True)
    forecaster.load(case.snapshot)
    with pytest.raises(ValueError, match="prompt_tokens"):
        forecaster.forecast(msgspec.structs.replace(case.candidate, prompt_tokens=0))
    with pytest.raises(ValueError, match="output length"):
        forecaster.forecast(msgspec.structs.replace(case.candidate, prompt_tokens=10**6))


@pytest.mark.parametrize("chunk", range(10))
def test_load_to_come_and_what_goes_or_comes_are_equal_in_every_field(chunk: int) -> None:
    for seed in range(chunk * STATES, (chunk + 1) * STATES):
        case = random_case(seed)
        rng = random.Random(f"moving {seed}")
        fast, plain = (loaded(case, native=native) for native in (True, False))
        leave_at = rng.choice((0, 0, rng.randrange(1, 2 * case.parameters.max_model_len)))
        here = [status.sequence for status in (*case.snapshot.running, *case.snapshot.waiting)]
        horizon_ns, points = rng.choice((0, 10**6, 10**8, 10**10)), rng.choice((2, 5, 16))
        goes, at_ns = rng.choice([*here, "stranger.0"]), rng.choice((None, random_moment(rng)))
        comer = msgspec.structs.replace(case.candidate, sequences=1)
        questions = [
            lambda each, h=horizon_ns, p=points: each.curve(h, p),
            lambda each, name=goes: each.leave(name),
            lambda each, one=comer, at=at_ns: each.join(one, at_ns=at),
            lambda each, one=case.candidate: each.forecast(one),
        ]
        rng.shuffle(questions)
        for forecaster in (fast, plain):
            forecaster.set_leave_at(leave_at)
        for number, ask in enumerate(questions):
            assert ask(fast) == ask(plain), f"seed {seed}, question {number}"


def test_the_random_states_reach_what_is_rare_of_moves() -> None:
    cases = [random_case(seed) for seed in range(400)]
    fast = [loaded(case, native=True) for case in cases]
    joins = [
        each.join(msgspec.structs.replace(case.candidate, sequences=1)) for each, case in zip(fast, cases, strict=True)
    ]
    running = [(each, case.snapshot.running) for each, case in zip(fast, cases, strict=True) if case.snapshot.running]
    leaves = [leave for each, row in running if (leave := each.leave(row[0].sequence)) is not None]
    assert sum(join.preemptions > 0 for join in joins) > 20
    assert sum(join.start_ns > 10**7 for join in joins) > 40
    assert sum(join.others_delay_ns < 0 for join in joins) > 0
    assert sum(leave.preemptions_avoided > 0 for leave in leaves) > 20
    assert sum(leave.relieved_ns > 0 for leave in leaves) > 60
    assert sum(leave.relieved_ns < 0 for leave in leaves) > 0
