"""A new service (tests/census.py) in simulated clusters: one SimService. tests/live/test_new_service.py runs it."""

from typing import Any

import pytest
from millrace.contracts.catalog import Role
from millrace.contracts.worker import Sampling
from millrace.enginemodel.coefficients import load_step_time
from millrace.sim.runtime_sim import SECOND

from services.ingress.calls.messages import Call, CallKind
from simulator.cluster import BUS
from simulator.scenarios.cluster import ScenarioCluster
from simulator.scenarios.reading import scenario_of
from simulator.services import SimService
from simulator.soak.cluster import SoakCluster
from simulator.soak.shape import MODEL, SoakShape
from tests.census import ACCEPTS, CensusConfig, build

#: Has the rights that it needs: to hear decisions, and to say that it is there.
ROLE = Role.SUPERVISOR


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
    cluster.services[ROLE] = SimService(ACCEPTS, build)
    cluster.add(ROLE, CensusConfig(bus=BUS))
    cluster.simulation.run_for(3 * SECOND)
    submitted(cluster, 6)
    cluster.simulation.run_for(5 * SECOND)
    (actor,) = cluster.of_role(ROLE)
    counted = actor.actor.snapshot()["decisions"]
    assert sum(counted.values()) == 6
    assert set(counted) <= {worker.name for worker in cluster.workers}
