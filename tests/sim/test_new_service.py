"""Parts of a new service in simulated clusters: a configuration, an actor, ``build``, and one SimService.

The service here counts decisions by instance. In the repository it is ``services/census`` with config.py, actor.py,
build.py, __main__.py, __init__.py and README.md, a role in contracts/channels.py and a function in
simulator/services.py: eight files.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from millrace.actor.config import BusConfig
from millrace.actor.deps import ActorDeps
from millrace.actor.effects import Effect, Subscribe
from millrace.contracts.catalog import Role
from millrace.contracts.message import Message
from millrace.contracts.observers import DecisionMade
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import Sampling
from millrace.enginemodel.coefficients import load_step_time
from millrace.sim.failure import SimulationFailed
from millrace.sim.runtime_sim import SECOND

from services.ingress.calls.messages import Call, CallKind
from simulator.cluster import BUS, SimulatedCluster
from simulator.scenarios.cluster import ScenarioCluster
from simulator.scenarios.reading import scenario_of
from simulator.services import SimService
from simulator.soak.cluster import SoakCluster
from simulator.soak.shape import MODEL, SoakShape

# services/census/config.py


class CensusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "census-0"
    bus: BusConfig = BusConfig()


# services/census/actor.py

ACCEPTS = (DecisionMade,)


class CensusActor:
    def __init__(self, *, name: str, cluster: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.decisions: dict[str, int] = {}
        self._subjects = Subjects(cluster)

    def start(self, now_ns: int) -> list[Effect]:
        return [Subscribe(subject=self._subjects.decisions())]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        if isinstance(message.body, DecisionMade):
            chosen = message.body.chosen
            self.decisions[chosen] = self.decisions.get(chosen, 0) + 1
        return []

    def snapshot(self) -> dict[str, Any]:
        return {"name": self.name, "decisions": dict(self.decisions)}

    def check_invariants(self) -> None:
        assert "" not in self.decisions


# services/census/build.py


def build(config: CensusConfig, deps: ActorDeps) -> CensusActor:
    return CensusActor(name=config.name, cluster=config.bus.cluster, incarnation=deps.incarnation)


# simulator/services.py


def census() -> SimService:
    return SimService(ACCEPTS, build)


def with_census(cluster: SimulatedCluster, role: Role = Role.OBSERVER) -> None:
    cluster.services[role] = census()
    cluster.add(role, CensusConfig(bus=BUS))


def submitted(cluster: ScenarioCluster | SoakCluster, count: int) -> None:
    (ingress,) = cluster.ingresses
    assert ingress.process is not None
    for number in range(count):
        sampling = Sampling(max_tokens=5, temperature=0.0)
        call = Call(
            request=f"r{number}", kind=CallKind.COMPLETION, model=MODEL, prompts=[[97, 98, 99]], sampling=sampling
        )
        cluster.clients.submit(ingress.process, call)


def scenario_cluster() -> ScenarioCluster:
    spec = scenario_of({"cluster": {"groups": [{"instances": 2}]}})
    return ScenarioCluster(spec, step_times=load_step_time, truth=lambda _request, _model: 5)


@pytest.mark.parametrize("cluster_of", [scenario_cluster, lambda: SoakCluster(1, SoakShape(ingresses=1))])
def test_a_new_service_runs_beside_the_others(cluster_of: Any) -> None:
    cluster = cluster_of()
    with_census(cluster)
    cluster.simulation.run_for(3 * SECOND)
    submitted(cluster, 6)
    cluster.simulation.run_for(5 * SECOND)
    (actor,) = cluster.of_role(Role.OBSERVER)
    counted = actor.actor.snapshot()["decisions"]
    assert sum(counted.values()) == 6
    assert set(counted) <= {worker.name for worker in cluster.workers}


def test_it_is_restarted_like_the_others() -> None:
    cluster = SoakCluster(1, SoakShape(ingresses=1))
    with_census(cluster)
    cluster.simulation.run_for(3 * SECOND)
    (actor,) = cluster.of_role(Role.OBSERVER)
    before = actor.actor
    cluster.simulation.faults.kill(actor)
    cluster.simulation.run_for(3 * SECOND)
    assert isinstance(actor.actor, CensusActor)
    assert actor.actor is not before
    assert cluster.restarts == 1


def test_it_needs_a_role_that_may_hear_what_it_hears() -> None:
    cluster = scenario_cluster()
    with pytest.raises(SimulationFailed, match=r"census-0 may not subscribe to mr\.sim\.decision"):
        with_census(cluster, Role.TAGGER)
