"""Sequences that move all the time in a cluster under random faults: seed after seed, and single promises.

``MILLRACE_SIM_SEEDS=500`` runs more; ``millrace sim --seeds 500 --migrations`` is the same without pytest.
"""

import functools

import pytest

from simulator.soak.migration_load import migration_for
from simulator.soak.run import SoakReport, SoakRun
from simulator.soak.seeds import shape_for
from tests.sim.soak_seeds import passed, soak_seeds

POLICY = "join_shortest_queue"
SEEDS = soak_seeds(10)
#: Those that are always run say whether enough happens: in 7 a continuation begins on a replica; of one seed in six, as
#: of the last two, moves fail after a freeze.
FIXED = [*SEEDS[: len(SEEDS) // 2], 7, 101, 112]


def scenario(seed: int, *, faults: bool = True, rate: float = 0.0) -> SoakRun:
    return SoakRun(seed, shape=shape_for(POLICY, migration_for(seed)), faults=faults, rate=rate)


@functools.cache
def report_of(seed: int) -> SoakReport:
    return passed(seed, POLICY, migrations=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults_to_sequences_that_move_break_no_promise(seed: int):
    assert report_of(seed).outcomes


def test_sequences_move_under_random_faults_and_some_moves_fail():
    reports = [report_of(seed) for seed in FIXED]
    ended: dict[str, int] = {}
    for report in reports:
        for how, count in report.migrations.items():
            ended[how] = ended.get(how, 0) + count
    assert sum(len(report.faults) for report in reports) > len(reports)
    assert ended["moved"] > 5 * len(reports)
    assert any(how.startswith(("aborted", "lost")) for how in ended), "nothing ever failed after a freeze"
    assert any(report.replicas.get("used") for report in reports), "no continuation began on a replica of KV"


def test_without_faults_every_call_completes_and_most_of_them_move():
    assert migration_for(22).bytes_per_s > 1e12, "over the slowest network few get there before they end"
    report = scenario(22, faults=False, rate=12.0).run()
    assert set(report.outcomes) <= {"completed", "abandoned"}
    assert report.restarts == 0
    assert report.migrations["moved"] > 20
    assert not [how for how in report.migrations if how.startswith("lost")]
