"""What a plan says: one stage over all lengths, and what each of its instances does there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from millrace.actor.effects import Effect, Log
from millrace.contracts.plan import InstanceRole, Stage

from services.coordinator.state import ModelState

NO_ROLES: Mapping[str, InstanceRole] = MappingProxyType({})


def plan_stages(instances: Iterable[str], roles: Mapping[str, InstanceRole]) -> list[Stage]:
    """One stage with every instance.

    Args:
        roles: By name or pattern, as configured.
    """
    names = sorted(instances)
    told = {name: role_of(name, roles) for name in names}
    others: dict[str, InstanceRole] = {name: role for name, role in told.items() if role is not InstanceRole.BOTH}
    return [Stage(name="s0", length_min=0, length_max=None, instances=names, roles=others)]


def role_of(name: str, roles: Mapping[str, InstanceRole]) -> InstanceRole:
    """The role that stands under the instance's name; else under the first pattern that fits; else BOTH."""
    if name in roles:
        return roles[name]
    return next((role for pattern, role in roles.items() if fnmatchcase(name, pattern)), InstanceRole.BOTH)


def nobody_prefills(model: str, state: ModelState, stages: Iterable[Stage]) -> list[Effect]:
    """Warns when all instances of a stage only decode, which have to prefill as well then; once until that is over."""
    before, state.only_decode = state.only_decode, [stage.name for stage in stages if _only_decode(stage)]
    if not state.only_decode or state.only_decode == before:
        return []
    return [Log(level="warning", event="nobody_prefills", fields={"model": model, "stages": state.only_decode})]


def _only_decode(stage: Stage) -> bool:
    return bool(stage.instances) and all(stage.roles.get(n) is InstanceRole.DECODE for n in stage.instances)
