"""The whole cluster in virtual time under random load and random faults, seed after seed.

``MILLRACE_SIM_SEEDS=500`` runs more; ``millrace sim --seeds 500`` is the same without pytest.
"""

import functools

import pytest
from millrace.contracts.catalog import Role
from millrace.contracts.worker import DrainWorker
from millrace.sim.runtime_sim import SECOND

from simulator.soak.run import SoakReport, SoakRun
from tests.sim.soak_seeds import passed, soak_seeds

SEEDS = soak_seeds(12)
#: Those that are always run say whether enough happens.
FIXED = SEEDS[: len(SEEDS) // 2]


@functools.cache
def report_of(seed: int) -> SoakReport:
    return passed(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults_break_no_promise(seed: int):
    assert report_of(seed).outcomes


def test_random_faults_are_many_and_most_calls_complete():
    reports = [report_of(seed) for seed in FIXED]
    outcomes: dict[str, int] = {}
    for report in reports:
        for outcome, count in report.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    assert sum(len(report.faults) for report in reports) > len(reports)
    assert outcomes["completed"] > 0.9 * sum(outcomes.values())
    assert max(report.epochs_max for report in reports) >= 1, "nothing was ever continued"


def undisturbed(seed: int, *, rate: float = 0.0) -> SoakRun:
    return SoakRun(seed, faults=False, rate=rate)


def test_killed_workers_fail_no_request():
    scenario = undisturbed(0)
    cluster = scenario.cluster
    for index in range(6):  # one at a time: the others go on
        worker = cluster.workers[index % len(cluster.workers)]
        cluster.simulation.after((2 + 2 * index) * SECOND // 2, cluster.simulation.faults.kill, worker)
    report = scenario.run()
    assert set(report.outcomes) <= {"completed", "abandoned"}
    assert report.epochs_max >= 1


def test_a_request_fails_for_no_number_of_instances_that_drain_one_after_the_other():
    """Beyond what two of three instances can do, so that queued ones meet drain after drain without a token."""
    scenario = undisturbed(0, rate=30.0)
    cluster, simulation = scenario.cluster, scenario.cluster.simulation
    for index in range(30):
        name = f"w{index % len(cluster.workers)}"
        drain = functools.partial(simulation.publish, cluster.subjects.engine(name, "drain"), DrainWorker(limit_ms=50))
        simulation.after(2 * SECOND + index * SECOND // 5, functools.partial(drain, sender="operator"))
    report = scenario.run()
    assert set(report.outcomes) <= {"completed", "abandoned"}
    assert report.restarts >= 10


@pytest.mark.parametrize("role", [Role.TAGGER, Role.COORDINATOR])
def test_killed_taggers_and_coordinators_fail_no_request(role: Role):
    scenario = undisturbed(21)
    cluster = scenario.cluster
    for actor in cluster.of_role(role):
        for second in (2, 4, 6):
            cluster.simulation.after(second * SECOND, cluster.simulation.faults.kill, actor)
    report = scenario.run()
    assert set(report.outcomes) <= {"completed", "abandoned"}
    assert report.restarts >= 3


@pytest.mark.parametrize(("seconds", "keep_store"), [(1, True), (8, False)])
def test_a_server_that_is_back_within_ten_seconds_fails_no_request(seconds: int, keep_store: bool):
    scenario = undisturbed(31)
    faults, simulation = scenario.cluster.simulation.faults, scenario.cluster.simulation
    simulation.after(4 * SECOND, lambda: faults.stop_bus(keep_store=keep_store))
    simulation.after((4 + seconds) * SECOND, faults.start_bus)
    report = scenario.run()
    assert set(report.outcomes) <= {"completed", "abandoned"}


def test_an_ingress_that_dies_loses_its_own_connections_and_workers_are_empty_afterwards():
    scenario = undisturbed(41, rate=30.0)
    cluster = scenario.cluster
    cluster.simulation.after(4 * SECOND, cluster.simulation.faults.kill, cluster.ingresses[0])
    report = scenario.run()  # ends with a look at every worker's sequences and blocks
    assert set(report.outcomes) <= {"completed", "abandoned", "connection lost"}
    assert report.outcomes["connection lost"] >= 1
