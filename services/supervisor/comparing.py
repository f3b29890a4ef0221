"""Compares the processes that run with those of a specification. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millrace.contracts.catalog import Role
from millrace.contracts.provisioner import ComparedProcess, ProcessChange

from services.supervisor.config import ChildSpec
from services.supervisor.state import Child, ChildState


def compared(
    running: Mapping[str, Child], wanted: Iterable[ChildSpec], spares: Iterable[ChildSpec]
) -> list[ComparedProcess]:
    """Every process that runs or is wanted, in the order of the specification, the others behind.

    Args:
        running: By name.
        wanted: That shall run.
        spares: Workers that may run.
    """
    shall = {spec.name: spec for spec in wanted}
    may = shall | {spec.name: spec for spec in spares}
    rows = [_wanted(spec, running.get(name)) for name, spec in may.items() if name in shall or name in running]
    return rows + [_row(child.spec, child, ProcessChange.REMOVED) for name, child in running.items() if name not in may]


def _wanted(spec: ChildSpec, child: Child | None) -> ComparedProcess:
    if child is None or child.state is ChildState.RETIRING:
        return _row(spec, child, ProcessChange.ADDED)
    return _row(spec, child, ProcessChange.SAME if child.spec == spec else ProcessChange.CHANGED)


def _row(spec: ChildSpec, child: Child | None, change: ProcessChange) -> ComparedProcess:
    worker = spec.role == Role.WORKER
    return ComparedProcess(
        name=spec.name,
        role=spec.role,
        change=change,
        state=str(child.state) if child is not None else "",
        model=spec.model if change is not ProcessChange.REMOVED else "",
        serves=child.spec.model if child is not None else "",
        instances=spec.presences if worker else [],
        failures=child.start_failures if child is not None else 0,
        detail=child.last_exit if child is not None else "",
        restarts=child.restarts if child is not None else 0,
    )
