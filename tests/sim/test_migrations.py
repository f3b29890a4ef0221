"""Sequences that move all the time in a cluster that is harmed: seed after seed, and single promises.

``millrace sim --seeds 1000 --migrations`` runs as many as one likes; a failing seed is named with what was done to it.
"""

import os
import resource

import pytest

from simulator.soak.migration_load import migration_for
from simulator.soak.run import SoakReport, SoakRun
from simulator.soak.seeds import shape_for

#: Processor time for random seeds in the ordinary test run, seconds.
BUDGET_S = 30.0
SEEDS = int(os.environ.get("MILLRACE_SIM_SEEDS", "0"))
POLICY = "join_shortest_queue"


def scenario(seed: int, *, faults: bool = True, rate: float = 0.0) -> SoakRun:
    return SoakRun(seed, shape=shape_for(POLICY, migration_for(seed)), faults=faults, rate=rate)


def processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.timeout(3600 if SEEDS else 600)
def test_random_harm_to_sequences_that_move_breaks_no_promise():
    began_s = processor_s()
    reports: list[SoakReport] = []
    while len(reports) < SEEDS if SEEDS else processor_s() - began_s < BUDGET_S:
        reports.append(scenario(len(reports)).run())
    ended: dict[str, int] = {}
    for report in reports:
        for how, count in report.migrations.items():
            ended[how] = ended.get(how, 0) + count
    print(f"{len(reports)} seeds, {sum(report.handled for report in reports):,} messages, {ended}")
    assert sum(len(report.faults) for report in reports) > len(reports)
    assert ended["moved"] > 5 * len(reports)
    assert any(how.startswith(("aborted", "lost")) for how in ended), "nothing ever failed after a freeze"


def test_the_same_seed_moves_the_same():
    assert scenario(5).run() == scenario(5).run()


def test_without_faults_every_call_completes_and_most_of_them_move():
    assert migration_for(22).bytes_per_s > 1e12, "over the slowest network few get there before they end"
    report = scenario(22, faults=False, rate=12.0).run()
    assert set(report.outcomes) <= {"completed", "abandoned"}
    assert report.restarts == 0
    assert report.migrations["moved"] > 20
    assert not [how for how in report.migrations if how.startswith("lost")]


def test_a_seed_draws_roles_and_whether_checksums_travel():
    shapes = [migration_for(seed) for seed in range(40)]
    assert {shape.verify for shape in shapes} == {True, False}
    assert {bool(shape.roles) for shape in shapes} == {True, False}
