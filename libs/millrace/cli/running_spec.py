"""The specification of a cluster as it runs now: counts, roles, boundaries and thresholds that changed since the start.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

import msgspec

from millrace.cli.cluster_rows import InstanceRow, StageRow
from millrace.cluster.cascade_spec import CascadeSpec
from millrace.cluster.spec import ClusterSpec, GroupSpec, ModelSpec, StageSpec
from millrace.cluster.workers import workers_of
from millrace.contracts.cascade import CascadePlan
from millrace.contracts.plan import InstanceRole
from millrace.supervision.service_fields import coordinator_fields

#: States of instances that run, or will in a moment.
_RUNNING = ("ready", "starting", "draining", "suspect")


def running_spec(
    spec: ClusterSpec, instances: Sequence[InstanceRow], stages: Sequence[StageRow], cascades: Iterable[CascadePlan]
) -> ClusterSpec:
    """The specification that starts what runs now.

    Args:
        spec: At the start.
        instances: Those heard, with their roles.
        stages: Of models with several, with their present boundaries.
        cascades: Plans in force.
    """
    running = {row.instance for row in instances if row.state in _RUNNING}
    return msgspec.structs.replace(
        spec,
        models=[_model(spec, model, running, stages) for model in spec.models],
        settings=msgspec.structs.replace(spec.settings, coordinator=_coordinator(spec, instances)),
        cascade=_cascade(spec.cascade, {plan.cascade: plan for plan in cascades}),
    )


def _model(spec: ClusterSpec, model: ModelSpec, running: set[str], stages: Sequence[StageRow]) -> ModelSpec:
    return msgspec.structs.replace(
        model,
        groups=[_group(spec, model, group, running) for group in model.groups],
        stages=_stages(model, [row for row in stages if row.model == model.name]),
    )


def _group(spec: ClusterSpec, model: ModelSpec, group: GroupSpec, running: set[str]) -> GroupSpec:
    """With as many instances as run now, the others of the group spare. Named ones keep their names."""
    slots = [slot for slot in workers_of(spec) if slot.model is model and slot.group is group]
    names = [name for slot in slots for name in slot.instances]
    count = sum(name in running for name in names)
    if group.names or not count or count == group.size:
        return group
    processes = count if group.processes == group.count else group.processes
    return msgspec.structs.replace(group, count=count, spares=len(names) - count, processes=processes)


def _stages(model: ModelSpec, rows: Sequence[StageRow]) -> list[StageSpec]:
    """The present ranges. Instances are named where the file named them."""
    if not rows:
        return model.stages
    named = {stage.name: stage.instances for stage in model.stages}
    return [
        StageSpec(name=r.stage, length_min=r.length_min, length_max=r.length_max, instances=named.get(r.stage, []))
        for r in rows
    ]


def _coordinator(spec: ClusterSpec, instances: Sequence[InstanceRow]) -> dict[str, object]:
    """The coordinator's settings, with the role of each instance that has another one than at the start."""
    own = spec.settings.coordinator
    begun = {**coordinator_fields(spec).get("roles", {}), **own.get("roles", {})}
    changed = {r.instance: str(r.role) for r in instances if r.state in _RUNNING and _role(begun, r.instance) != r.role}
    return {**own, "roles": {**own.get("roles", {}), **changed}} if changed else own


def _role(roles: dict[str, str], instance: str) -> str:
    """As the coordinator reads them: a name wins, then the first pattern that fits."""
    patterns = (role for pattern, role in roles.items() if fnmatchcase(instance, pattern))
    return str(roles.get(instance) or next(patterns, InstanceRole.BOTH))


def _cascade(cascade: CascadeSpec | None, plans: dict[str, CascadePlan]) -> CascadeSpec | None:
    plan = plans.get(cascade.name) if cascade is not None else None
    if cascade is None or plan is None:
        return cascade
    thresholds = [tier.threshold for tier in plan.tiers][: len(cascade.tiers) - 1]
    changed = thresholds != cascade.tier_thresholds[:-1]
    return msgspec.structs.replace(cascade, thresholds=thresholds) if changed else cascade


def with_differences(start: str, now: str) -> Iterator[str]:
    """The lines of ``now``, with a comment at each that ``start`` has otherwise; those that are gone are comments."""
    before, after = start.splitlines(), now.splitlines()
    for kind, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from after[c:d]
            continue
        old = {line.partition(" = ")[0]: line for line in before[a:b] if line}
        for line in after[c:d]:
            was = old.pop(line.partition(" = ")[0], "")
            yield f"{line}  # at the start: {was or 'not there'}" if line else line
        yield from (f"# at the start: {line}" for line in old.values())
