"""Policies on roles: what a stage keeps, and fixed roles."""

from millrace.contracts.plan import InstanceRole
from millrace.policies.registry import Nothing
from millrace.policies.roles import ROLE_POLICIES, Flip, RoleInstance, RolesView, may_take_role
from millrace.policies.roles.fixed import policy as fixed

BOTH, PREFILL, DECODE = InstanceRole


def stage(**roles: InstanceRole) -> RolesView:
    instances = tuple(RoleInstance(name=name, role=role, home=role) for name, role in roles.items())
    return RolesView(model="m", stage="s0", instances=instances)


def test_a_stage_keeps_who_prefills_and_who_decodes() -> None:
    view = stage(a=PREFILL, b=DECODE)
    assert not may_take_role(view, "a", DECODE)
    assert not may_take_role(view, "b", PREFILL)
    assert may_take_role(view, "a", BOTH)
    assert not may_take_role(stage(a=BOTH), "a", DECODE)


def test_every_policy_stands_still_where_all_have_their_role() -> None:
    for policy in ROLE_POLICIES.shipped():
        for view in (stage(a=PREFILL, b=DECODE), stage()):
            decision, _ = policy.decide(view, policy.parameters(), policy.initial_state, 0)
            assert decision.flips == ()


def test_fixed_brings_back_who_is_away() -> None:
    away = RoleInstance(name="a", role=BOTH, home=PREFILL)
    view = RolesView(model="m", stage="s0", instances=(away, RoleInstance(name="b", role=DECODE, home=DECODE)))
    decision, _ = fixed.decide(view, Nothing(), Nothing(), 0)
    assert decision.flips == (Flip("a", PREFILL),)
