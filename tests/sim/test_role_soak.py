"""Seeds of the roles soak: flips, orders, scaling, brokers, wrong estimates and faults; and a checker that can fail."""

from types import SimpleNamespace
from typing import Any

import pytest
from millrace.actor.effects import PutKey
from millrace.contracts.plan import InstanceRole, Plan, Stage
from millrace.sim.checkers.roles import CapableRoles

from tests.sim.soak_seeds import passed, soak_seeds


@pytest.mark.parametrize("seed", soak_seeds(3))
def test_roles_flip_and_instances_come_and_go_under_faults(seed: int) -> None:
    assert passed(seed, wrong_estimates=True, roles=True).roles["flips"] > (0 if seed == 0 else -1)


@pytest.mark.parametrize(("told", "missing"), [(InstanceRole.PREFILL, "decodes"), (InstanceRole.DECODE, "prefills")])
def test_a_plan_in_which_nobody_decodes_or_prefills_is_found(told: InstanceRole, missing: str) -> None:
    stage = Stage(name="s0", length_min=0, length_max=None, instances=["w0", "w1"], roles={"w0": told, "w1": told})
    plan = Plan(model="m", epoch=1, stages=[stage], coordinator="c")
    process: Any = SimpleNamespace(now_ns=0)
    with pytest.raises(AssertionError, match=f"no instance {missing}"):
        CapableRoles(gap_ns=0).on_handled(process, None, [PutKey(bucket="plan", key="m", value=plan, correlation="p")])  # type: ignore[arg-type]
