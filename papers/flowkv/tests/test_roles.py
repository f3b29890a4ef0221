"""FlowKV's scores, scenarios and flips."""

from __future__ import annotations

import msgspec
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import LoadIndicators, PhaseQueues
from millrace.policies.roles import ROLE_POLICIES, Flip, RoleInstance, RolesView

from papers.flowkv import roles
from papers.flowkv.roles import Scenario
from tests.unit.coordinator_bench import record, summary

BOTH, PREFILL, DECODE = InstanceRole
S = 1_000_000_000

#: Of waiting sequences alone: the score is their number, as a share of the largest batch.
WEIGHTS = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
LITERAL = roles.Parameters(
    prefill_weights=WEIGHTS,
    decode_weights=WEIGHTS,
    prefill_low=0.5,
    decode_low=0.5,
    prefill_high=2.0,
    decode_high=2.0,
    idle=0.2,
    extreme_s=3.0,
)


def instance(name: str, role: InstanceRole, waits: float, home: InstanceRole | None = None) -> RoleInstance:
    limits = record(name)
    queue = PhaseQueues(waiting=round(waits * limits.max_sequences))
    load = LoadIndicators(prefill=queue, decode=queue)
    heard = msgspec.structs.replace(summary(name), indicators=load)
    return RoleInstance(name=name, role=role, home=home or role, record=limits, summaries=(heard,))


def loaded(prefill: float, decode: float) -> RolesView:
    return RolesView(
        model="m", stage="s0", instances=(instance("p0", PREFILL, prefill), instance("d0", DECODE, decode))
    )


def test_scenarios_follow_the_scores() -> None:
    for prefill, decode, scenario in (
        (0.1, 0.5, Scenario.NORMAL),
        (0.6, 0.1, Scenario.IMBALANCED),
        (0.6, 0.6, Scenario.IMBALANCED),
        (2.1, 0.0, Scenario.EXTREME),
        (0.0, 2.1, Scenario.EXTREME),
    ):
        decision, _ = roles.decide(loaded(prefill, decode), LITERAL, roles.State(), S)
        assert decision.reason.startswith(scenario), (prefill, decode)


def test_idle_instances_help_while_the_load_is_imbalanced_and_then_go_back() -> None:
    decision, state = roles.decide(loaded(0.9, 0.1), LITERAL, roles.State(), S)
    assert decision.flips == (Flip("d0", BOTH),)
    helping = (instance("p0", PREFILL, 0.0), instance("d0", BOTH, 0.0, home=DECODE))
    view = RolesView(model="m", stage="s0", instances=helping)
    assert roles.decide(view, LITERAL, state, 2 * S)[0].flips == (Flip("d0", DECODE),)


def test_an_extreme_load_that_lasts_is_told() -> None:
    first, state = roles.decide(loaded(3.0, 3.0), LITERAL, roles.State(), S)
    later, _ = roles.decide(loaded(3.0, 3.0), LITERAL, state, 5 * S)
    assert "lasting" not in first.reason
    assert "lasting" in later.reason


def test_without_loads_nothing_is_decided() -> None:
    view = RolesView(model="m", stage="s0", instances=(RoleInstance(name="a", role=PREFILL, home=BOTH),))
    decision, _ = roles.decide(view, LITERAL, roles.State(), S)
    assert decision.flips == ()
    assert decision.reason.startswith(Scenario.UNKNOWN)


def test_it_is_a_policy_that_observes() -> None:
    policy, parameters = ROLE_POLICIES.choose(roles.__file__, {"idle": 0.3})
    assert policy.observes
    assert parameters.idle == 0.3  # type: ignore[attr-defined]
