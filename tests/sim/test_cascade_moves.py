"""Engines of a cascade change their model in virtual time: the coordinator's and the supervisor's own actors."""

from __future__ import annotations

from typing import Any

import pytest
from millrace.actor.effects import Effect
from millrace.sim.failure import SimulationFailed

from services.coordinator.cascade_moves import CascadeMoves
from services.coordinator.cascade_state import CascadeState
from simulator.soak.cascading import DEVICES, CascadeSoakCluster, CascadeSoakRun


def test_engines_change_their_model_and_no_call_fails() -> None:
    run = CascadeSoakRun(2, faults=False, rate=25.0)
    report = run.run()
    assert set(report.outcomes) <= {"completed", "abandoned"}
    assert run.moves.ended["cascade_moved"] > 0
    assert run.cluster.models() != ("large", "middle", "small") or len(run.cluster.workers) > DEVICES


@pytest.mark.parametrize("seed", [139, 179])
def test_a_worker_that_is_killed_while_it_waits_for_the_bus_starts_again(seed: int) -> None:
    CascadeSoakRun(seed).run()


def _first_failure(run: type[CascadeSoakRun], seeds: range, **fields: Any) -> str:
    for seed in seeds:
        try:
            run(seed, faults=False, rate=25.0, **fields).run()
        except SimulationFailed as failure:
            return str(failure)
    return ""


class Unbounded(CascadeSoakCluster):
    """A supervisor that does not count devices."""

    devices = 0


class UnboundedRun(CascadeSoakRun):
    cluster_type = Unbounded


class Impatient(CascadeMoves):
    """Starts without having stopped anything."""

    def _next(self, state: CascadeState, move: Any, counts: Any, serving: Any) -> Any:
        tiers = state.config.tiers
        lacking = [tier for tier, now, end in zip(tiers, counts, move.instances, strict=True) if now < end]
        if state.orders:
            return []
        return [self._order("start", lacking[0])] if lacking else super()._next(state, move, counts, serving)


def test_the_checker_sees_engines_that_take_a_device_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CascadeMoves, "_next", Impatient._next)
    assert f"workers on {DEVICES} devices" in _first_failure(UnboundedRun, range(6))


def test_a_coordinator_that_stops_all_engines_at_once_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: CascadeMoves, state: CascadeState, serving: Any, now_ns: int) -> tuple[None, list[Effect]]:
        every = [record.instance for records in serving.values() for record in records]
        tiers = {tier.model: tier for tier in state.config.tiers}
        models = {record.instance: record.model for records in serving.values() for record in records}
        return None, [self._ask(state, self._order("stop", tiers[models[name]], name)) for name in every]

    monkeypatch.setattr(CascadeMoves, "step", step)
    assert _first_failure(CascadeSoakRun, range(6)) != ""
