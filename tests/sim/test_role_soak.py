"""Seeds of the roles soak: flips, orders, scaling, brokers, wrong estimates and faults; and a checker that can fail."""

from typing import Any

import msgspec
import pytest
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import PutKey
from millrace.contracts.catalog import Role
from millrace.contracts.message import Message
from millrace.contracts.plan import InstanceRole, Plan
from millrace.sim.failure import SimulationFailed

from simulator.soak.roles import RolesSoakCluster, RolesSoakRun, roles_shape
from tests.sim.soak_seeds import passed, soak_seeds


@pytest.mark.parametrize("seed", soak_seeds(3))
def test_roles_flip_and_instances_come_and_go_under_faults(seed: int) -> None:
    assert passed(seed, wrong_estimates=True, roles=True).roles


class _OneSided:
    """A coordinator whose plans give all instances one role."""

    def __init__(self, inner: Any, role: InstanceRole) -> None:
        self._inner, self._role = inner, role

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def handle(self, message: Message, now_ns: int) -> list[Any]:
        return [self._spoilt(effect) for effect in self._inner.handle(message, now_ns)]

    def _spoilt(self, effect: Any) -> Any:
        if not isinstance(effect, PutKey) or not isinstance(effect.value, Plan):
            return effect
        stages = [
            msgspec.structs.replace(stage, roles=dict.fromkeys(stage.instances, self._role))
            for stage in effect.value.stages
        ]
        return msgspec.structs.replace(effect, value=msgspec.structs.replace(effect.value, stages=stages))


@pytest.mark.parametrize(("told", "missing"), [(InstanceRole.PREFILL, "decodes"), (InstanceRole.DECODE, "prefills")])
def test_a_plan_in_which_nobody_decodes_or_prefills_fails_the_seed(told: InstanceRole, missing: str) -> None:
    class Spoilt(RolesSoakCluster):
        def build_actor(self, role: Role, config: Any, deps: ActorDeps) -> Actor:
            actor = super().build_actor(role, config, deps)
            return _OneSided(actor, told) if role is Role.COORDINATOR else actor

    with pytest.raises(SimulationFailed, match=f"no instance {missing}"):
        RolesSoakRun(1, shape=roles_shape(1), faults=False, cluster=Spoilt).run()
