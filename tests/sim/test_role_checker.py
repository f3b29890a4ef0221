"""Checker of roles: what it asks of the plans that a coordinator writes."""

from typing import cast

import pytest
from millrace.actor.effects import PutKey
from millrace.contracts.message import Message
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.sim.checkers.roles import CapableRoles
from millrace.sim.process import SimProcess

DECODE = InstanceRole.DECODE


class Process:
    now_ns = 0


def look(checker: CapableRoles, *, orders: dict[str, InstanceRole]) -> None:
    stage = Stage(name="s0", length_min=0, length_max=None, instances=["w0"], roles={"w0": DECODE})
    plan = Plan(model="m", epoch=1, stages=[stage], coordinator="c", role_orders=orders)
    put = PutKey(bucket="b", key="k", value=plan, correlation="c")
    checker.on_handled(cast(SimProcess, Process()), cast(Message, None), [put])


def test_a_stage_that_only_decodes_is_found() -> None:
    with pytest.raises(AssertionError, match="no instance prefills"):
        look(CapableRoles(gap_ns=0), orders={})
