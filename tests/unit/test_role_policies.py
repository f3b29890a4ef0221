"""Policies on roles: indicators over a window, the fluid approximation, and what fixed, flowkv and pressure decide."""

from __future__ import annotations

import math

import msgspec
import pytest
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import EngineTotals, InstanceSummary, LoadIndicators, PhaseQueues
from millrace.policies.roles import ROLE_POLICIES, Demand, Flip, RoleInstance, RolesView, Scenario, may_take_role
from millrace.policies.roles.fixed import policy as fixed
from millrace.policies.roles.flow import Targets, present, simulate
from millrace.policies.roles.flowkv import policy as flowkv
from millrace.policies.roles.indicators import (
    PREFILL_TERMS,
    Indicators,
    InstanceLimits,
    indicators_of,
    sample_of,
    score,
)
from millrace.policies.roles.pressure import policy as pressure
from millrace.policies.stages.instance import InstanceModel

BOTH, PREFILL, DECODE = InstanceRole
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
BACKLOG = Indicators(prefill_tokens_left=100_000, context_tokens=100_000)
DECODES = Indicators(decoding=120, context_tokens=110_000, kv_now=1.0)
FLOW = Demand(requests_per_s=2.0, prompt_tokens=2000.0, output_tokens=200.0)


def summary(at_s: float, *, steps: int = 0, waiting: int = 0, memory: float | None = None) -> InstanceSummary:
    totals = EngineTotals(steps, steps * S // 10, 2 * steps, 30 * steps, 100 * steps)
    return InstanceSummary(
        instance="w",
        incarnation=1,
        model="m",
        at_ns=round(at_s * S),
        running=2,
        waiting=waiting,
        running_tokens=300,
        waiting_prefill_tokens=0,
        blocks_free=60,
        blocks_total=100,
        block_size=16,
        preemptions=0,
        output_tokens_total=0,
        indicators=LoadIndicators(
            PhaseQueues(1, waiting, 0, 0), PhaseQueues(1, 0, 1, 1), 70, 2 * S, 20, totals, memory
        ),
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


def test_memory_bandwidth_is_measured_or_from_the_step_model() -> None:
    assert found(summary(0, memory=0.2), summary(1, steps=2, memory=0.6)).memory == pytest.approx(0.4)
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
        LoadIndicators(memory_busy=math.nan),
        LoadIndicators(memory_busy=7.0),
        None,
    ],
)
def test_absurd_indicators_are_no_sample(load: LoadIndicators | None) -> None:
    assert sample_of(msgspec.structs.replace(summary(0), indicators=load)) is None


def test_a_score_leaves_out_what_is_no_number() -> None:
    broken = Indicators(waiting_prefill=math.nan, running_prefill=0.5)
    assert score(broken, PREFILL_TERMS, (2.0, 1.0, 0, 0, 0, 0, 0, 0)) == 1.0


# stages


def instance(name: str, role: InstanceRole, load: Indicators | None = None, **fields: object) -> RoleInstance:
    known = {"home": role, "model": MODEL, "indicators": load or Indicators()} | fields
    return RoleInstance(name=name, role=role, **known)  # type: ignore[arg-type]


def stage(*instances: RoleInstance, demand: Demand = FLOW) -> RolesView:
    return RolesView(model="m", stage="s0", instances=instances, demand=demand)


def test_a_stage_keeps_who_prefills_and_who_decodes() -> None:
    view = stage(instance("a", PREFILL), instance("b", DECODE))
    assert not may_take_role(view, "a", DECODE)
    assert not may_take_role(view, "b", PREFILL)
    assert may_take_role(view, "a", BOTH)
    assert not may_take_role(stage(instance("a", BOTH)), "a", DECODE)


def test_every_policy_stands_still_without_load_and_without_instances() -> None:
    idle = stage(instance("a", PREFILL), instance("b", DECODE), demand=Demand())
    for policy in ROLE_POLICIES.shipped():
        for view in (idle, stage(), stage(instance("a", BOTH, heard=False, model=None))):
            decision, _ = policy.decide(view, policy.parameters(), policy.initial_state, 10 * S)
            assert decision.flips == ()


def test_fixed_brings_back_who_is_away_and_mends_no_load() -> None:
    view = stage(instance("a", BOTH, home=PREFILL), instance("b", DECODE))
    decision, _ = fixed.decide(view, fixed.Parameters(), fixed.State(), 0)
    assert decision.flips == (Flip("a", PREFILL),)
    assert decision.unmended


# pressure

PARAMETERS = pressure.Parameters(ttft_s=2.0, tpot_s=0.05, step_share=0.0)
PROMPTS = stage(
    instance("p0", PREFILL, BACKLOG), instance("d0", DECODE), instance("d1", DECODE, Indicators(decoding=5))
)
ANSWERS = stage(
    instance("d0", DECODE, DECODES),
    instance("p0", PREFILL),
    instance("p1", PREFILL),
    demand=msgspec.structs.replace(FLOW, prompt_tokens=100.0, output_tokens=800.0),
)


def held(view: RolesView, seconds: float = 6.0) -> pressure.RoleDecision:
    _, state = pressure.decide(view, PARAMETERS, pressure.State(), S)
    return pressure.decide(view, PARAMETERS, state, S + round(seconds * S))[0]


def test_pressures_of_an_idle_stage_are_a_prompt_and_nothing() -> None:
    now = present(stage(instance("a", BOTH)).instances, FLOW, Targets(ttft_s=2.0, tpot_s=0.05))
    assert 0 < now.prefill < 0.2
    assert now.decode == 0.0


def test_without_anybody_for_a_phase_its_pressure_is_infinite() -> None:
    targets = Targets(ttft_s=1.0, tpot_s=0.1)
    assert present([instance("a", DECODE)], FLOW, targets).prefill == math.inf
    assert present([instance("a", PREFILL)], FLOW, targets).decode == math.inf


def test_more_instances_for_the_overloaded_phase_are_simulated_as_better() -> None:
    targets = PARAMETERS.targets
    stays = simulate(PROMPTS.instances, {}, FLOW, targets)
    flipped = simulate(PROMPTS.instances, {"d0": PREFILL}, FLOW, targets)
    assert flipped.prefill < stays.prefill
    assert flipped.worst < stays.worst


def test_an_idle_decoder_is_flipped_where_prompts_wait_too_long() -> None:
    decision = held(PROMPTS)
    assert decision.scenario is Scenario.IMBALANCED
    assert [flip.instance for flip in decision.flips] == ["d0"]
    assert decision.flips[0].role in (PREFILL, BOTH)
    assert decision.prefill > 1 > 0.6 > decision.decode


def test_an_idle_prefiller_is_flipped_where_decodes_have_no_room() -> None:
    decision = held(ANSWERS)
    assert decision.flips[0].instance in ("p0", "p1")
    assert decision.flips[0].role in (DECODE, BOTH)


@pytest.mark.parametrize(("idle", "flips"), [(0.05, True), (0.0, False)])
def test_an_idle_prefiller_helps_decodes_that_meet_their_objective(idle: float, flips: bool) -> None:
    served = instance("d0", DECODE, Indicators(decoding=100, context_tokens=40_000, kv_now=0.4))
    demand = Demand(requests_per_s=2.0, prompt_tokens=100.0, output_tokens=400.0)
    view = stage(served, instance("p0", PREFILL), instance("p1", PREFILL), demand=demand)
    parameters = msgspec.structs.replace(PARAMETERS, idle=idle)
    _, state = pressure.decide(view, parameters, pressure.State(), S)
    decision, _ = pressure.decide(view, parameters, state, 7 * S)
    assert parameters.busy < decision.decode < parameters.low, "the objective is met"
    assert [flip.instance for flip in decision.flips] == (["p0"] if flips else [])
    fast = stage(*(msgspec.structs.replace(each, movable=False) for each in view.instances), demand=demand)
    decision, _ = pressure.decide(fast, parameters, state, 7 * S)
    assert not decision.unmended, "objectives that are met are no reason to scale"


def test_nobody_is_flipped_before_the_imbalance_has_lasted() -> None:
    assert held(PROMPTS, seconds=4.0).flips == ()
    _, state = pressure.decide(PROMPTS, PARAMETERS, pressure.State(), S)
    _, state = pressure.decide(stage(*PROMPTS.instances[1:], instance("p0", PREFILL)), PARAMETERS, state, 4 * S)
    assert pressure.decide(PROMPTS, PARAMETERS, state, 7 * S)[0].flips == ()


def test_who_may_not_be_moved_is_not_flipped() -> None:
    fast = [msgspec.structs.replace(each, movable=False) for each in PROMPTS.instances]
    decision = held(stage(*fast))
    assert decision.flips == ()
    assert decision.unmended


def test_both_phases_overloaded_is_a_matter_of_scaling() -> None:
    view = stage(instance("p0", PREFILL, BACKLOG), instance("d0", DECODE, DECODES))
    decision, _ = pressure.decide(view, PARAMETERS, pressure.State(), S)
    assert decision.scenario is Scenario.EXTREME
    assert decision.unmended
    assert decision.flips == ()


def test_a_lone_decoder_does_both_at_most() -> None:
    view = stage(instance("p0", PREFILL, BACKLOG), instance("d0", DECODE))
    assert [flip.role for flip in pressure.candidates(view, "prefill")] == [BOTH]


def test_with_an_unknown_instance_nothing_is_flipped() -> None:
    view = stage(*PROMPTS.instances, instance("x", DECODE, model=None))
    assert held(view).scenario is Scenario.UNKNOWN


# priority inside an instance

PRIORITY = msgspec.structs.replace(PARAMETERS, step_share=0.8, step_tokens_min=64)
MIXED = Indicators(decoding=50, context_tokens=20_000, prefill_tokens_left=9_000)


def ordered(view: RolesView, parameters: pressure.Parameters = PRIORITY) -> dict[str, int]:
    decision, _ = pressure.decide(view, parameters, pressure.State(), S)
    return {each.instance: each.tokens for each in decision.priorities}


def test_a_step_beside_prompts_is_bounded_to_its_share_of_the_objective() -> None:
    (tokens,) = ordered(stage(instance("b0", BOTH, MIXED))).values()
    decode_s = 0.01 + 50 * 1e-4 + 20_000 * 1e-7
    assert tokens == math.ceil(50 + (0.8 * 0.05 - decode_s) / 1e-4)
    assert ordered(stage(instance("b0", BOTH, MIXED)), PARAMETERS) == {}, "off without a share"


def test_where_prompts_are_late_a_bound_may_cost_a_share_of_their_throughput() -> None:
    late = msgspec.structs.replace(MIXED, prefill_tokens_left=200_000)
    decode_s, token_s = 0.01 + 50 * 1e-4 + 20_000 * 1e-7, 1e-4

    def rate(tokens: float) -> float:
        return (tokens - 50) / (decode_s + (tokens - 50) * token_s)

    for slowdown in (0.05, 0.1, 0.3):
        priced = msgspec.structs.replace(PRIORITY, slowdown_max=slowdown)
        (tokens,) = ordered(stage(instance("b0", BOTH, late)), priced).values()
        assert rate(tokens) >= (1 - slowdown) * rate(PRIORITY.chunk_tokens) > rate(tokens - 2)
    free = msgspec.structs.replace(PRIORITY, slowdown_max=0.0)
    assert ordered(stage(instance("b0", BOTH, late)), free) == {}, "prompts come first"


def test_no_step_is_bounded_below_the_least_nor_at_the_engines_own_budget() -> None:
    crowded = msgspec.structs.replace(MIXED, decoding=30, context_tokens=900_000)
    patient = msgspec.structs.replace(PRIORITY, ttft_s=100.0)
    assert ordered(stage(instance("b0", BOTH, crowded)), patient) == {"b0": 64}
    few = instance("b0", BOTH, MIXED, token_budget=100)
    assert ordered(stage(few)) == {}, "its whole budget is within the share already"
    assert ordered(stage(instance("b0", BOTH, MIXED, token_budget=300)))


@pytest.mark.parametrize(
    ("role", "load", "demand", "bounded"),
    [
        (BOTH, MIXED, Demand(), True),
        (BOTH, DECODES, FLOW, True),
        (BOTH, DECODES, Demand(), False),
        (BOTH, BACKLOG, FLOW, False),
        (DECODE, DECODES, FLOW, False),
        (PREFILL, MIXED, FLOW, True),
    ],
)
def test_priority_is_for_decodes_beside_prompts(
    role: InstanceRole, load: Indicators, demand: Demand, bounded: bool
) -> None:
    assert bool(ordered(stage(instance("x", role, load), demand=demand))) is bounded


def test_of_an_instance_that_is_silent_or_unknown_nothing_is_ordered() -> None:
    assert ordered(stage(instance("x", BOTH, MIXED, heard=False))) == {}
    assert ordered(stage(instance("x", BOTH, MIXED, model=None))) == {}


def test_flips_are_judged_by_what_priority_leaves_to_mend() -> None:
    mixed = stage(instance("b0", BOTH, MIXED), instance("p0", PREFILL))
    before, after = (present(mixed.instances, FLOW, p.targets) for p in (PARAMETERS, PRIORITY))
    assert before.decode > PARAMETERS.high > after.decode
    assert after.prefill >= before.prefill


def test_without_flips_nobody_is_flipped_and_steps_are_bounded_all_the_same() -> None:
    alone = msgspec.structs.replace(PRIORITY, flips=False)
    view = stage(*PROMPTS.instances, instance("b0", BOTH, MIXED))
    _, state = pressure.decide(view, alone, pressure.State(), S)
    decision, _ = pressure.decide(view, alone, state, 20 * S)
    assert decision.flips == ()
    assert [each.instance for each in decision.priorities] == ["b0"]


def test_parameters_out_of_range_are_refused() -> None:
    for wrong in ({"low": 1.5}, {"ttft_s": 0.0}, {"margin": 1.0}, {"hold_s": -1.0}, {"idle": 0.7}, {"busy": 0.01}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            pressure.Parameters(**wrong)


# flowkv

WEIGHTS = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
LITERAL = flowkv.Parameters(
    prefill_weights=WEIGHTS,
    decode_weights=WEIGHTS,
    prefill_low=0.5,
    decode_low=0.5,
    prefill_high=2.0,
    decode_high=2.0,
    idle=0.2,
    extreme_s=3.0,
)


def loaded(prefill: float, decode: float) -> RolesView:
    return stage(
        instance("p0", PREFILL, Indicators(waiting_prefill=prefill)),
        instance("d0", DECODE, Indicators(waiting_decode=decode)),
    )


def test_scenarios_follow_the_scores() -> None:
    for prefill, decode, scenario in (
        (0.1, 0.5, Scenario.NORMAL),
        (0.6, 0.1, Scenario.IMBALANCED),
        (0.6, 0.6, Scenario.IMBALANCED),
        (2.1, 0.0, Scenario.EXTREME),
        (0.0, 2.1, Scenario.EXTREME),
    ):
        decision, _ = flowkv.decide(loaded(prefill, decode), LITERAL, flowkv.State(), S)
        assert decision.scenario is scenario, (prefill, decode)


def test_idle_instances_help_while_the_load_is_imbalanced_and_then_go_back() -> None:
    decision, state = flowkv.decide(loaded(0.9, 0.1), LITERAL, flowkv.State(), S)
    assert decision.flips == (Flip("d0", BOTH),)
    helping = stage(instance("p0", PREFILL), instance("d0", BOTH, home=DECODE))
    assert flowkv.decide(helping, LITERAL, state, 2 * S)[0].flips == (Flip("d0", DECODE),)


def test_an_extreme_load_is_told_on_once_it_has_lasted() -> None:
    first, state = flowkv.decide(loaded(3.0, 3.0), LITERAL, flowkv.State(), S)
    later, _ = flowkv.decide(loaded(3.0, 3.0), LITERAL, state, 5 * S)
    assert not first.unmended
    assert later.unmended
