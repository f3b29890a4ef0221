"""Content of a migrator's heartbeat about migrations under way."""

from millrace.contracts.codec import decode, encode
from millrace.contracts.status import InstanceMigrations, ServicePresence

from services.migrator.actor import TOLD_MAX
from services.migrator.config import MigratorLimits
from services.migrator.outgoing import MIGRATIONS_MAX
from tests.unit.migrator_rig import MS, START_NS, Rig


def heartbeat(rig: Rig, instance: str) -> ServicePresence:
    """Its last one."""
    return [body for name, body in rig.said if name == instance and isinstance(body, ServicePresence)][-1]


def slowly_moving(sequences: int, **limits: int) -> Rig:
    """So many sequences of ``a`` are asked to move to ``b``, whose reads take half a second each."""
    rig = Rig("a", "b", limits=MigratorLimits(**limits))
    rig.workers["b"].pull_ns = 500 * MS
    rig.workers["b"].blocks_free, rig.workers["b"].reservations_max = 10_000, sequences
    for index in range(sequences):
        rig.decode("a", f"r.{index}", prompt=400)
    rig.run(800)
    for index in range(sequences):
        rig.order(f"r.{index}")
    rig.run(250)  # past the second heartbeat
    return rig


def test_the_source_tells_each() -> None:
    rig = slowly_moving(5)
    told = heartbeat(rig, "a")
    assert told.moving == [InstanceMigrations("a", 5)]
    assert [(each.sequence, each.source, each.target, each.step) for each in told.migrations] == [
        (f"r.{index}", "a", "b", "preparing") for index in range(5)
    ]
    assert {each.began_ns for each in told.migrations} == {START_NS + 800 * MS}
    assert decode(encode(told)) == told


def test_what_was_copied_grows_and_in_the_end_nothing_is_told() -> None:
    rig = slowly_moving(1, pull_bytes_first=20_000)  # a fifth of it with each pull
    assert heartbeat(rig, "a").migrations[0].bytes == 0
    rig.run(1_000)
    assert heartbeat(rig, "a").migrations[0].bytes > 0
    rig.run(4_000)
    assert heartbeat(rig, "a").migrations == []
    assert heartbeat(rig, "a").moving == []


def test_a_crowd_is_told_of_up_to_a_bound_and_counted_whole() -> None:
    rig = slowly_moving(TOLD_MAX + 8)
    told = heartbeat(rig, "a")
    assert len(told.migrations) == min(TOLD_MAX, MIGRATIONS_MAX)
    assert told.moving[0].leaving == MIGRATIONS_MAX
