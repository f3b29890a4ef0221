"""Values that are none, as a watch meets them on a real nats-server: the simulated store holds no such values."""

from collections.abc import AsyncIterator

import pytest
from millrace.actor.effects import DeleteKey, WatchKeys
from millrace.contracts.codec import encode
from millrace.contracts.local import BucketReady, KeyChanged, KeyPut, KeyUnreadable
from millrace.contracts.subjects import Subjects

from tests.contract.bus.harness import NatsHarness
from tests.contract.bus.probe import Probe
from tests.contract.bus.test_keys import plan, put, record

GARBAGE = [b"\x00garbage", encode(record("w0"))]


@pytest.fixture
async def bus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsHarness]:
    harness = NatsHarness(tmp_path_factory.mktemp("nats"))
    yield harness
    await harness.close()


async def write(bus: NatsHarness, key: str, payload: bytes) -> None:
    await bus.publish_bytes(f"$KV.{Subjects(bus.cluster).bucket('plan')}.{key}", payload)


async def watching(bus: NatsHarness) -> Probe:
    probe = await bus.add(Probe("probe", WatchKeys(bucket="plan")))
    bus.tell(probe, put("k", 1))
    await bus.until(lambda: probe.bodies(KeyPut) and probe.bodies(KeyChanged))
    return probe


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_value_that_is_none_takes_nothing_back_and_its_owner_replaces_it(bus: NatsHarness, garbage: bytes):
    probe = await watching(bus)
    await write(bus, "k", garbage)
    await bus.until(lambda: probe.bodies(KeyUnreadable))
    [told] = probe.bodies(KeyUnreadable)
    assert [body.value for body in probe.bodies(KeyChanged)] == [plan(1)]
    bus.tell(probe, DeleteKey(bucket="plan", key="k", correlation="d", expected_revision=told.revision), put("k", 2, 0))
    await bus.until(lambda: len(probe.bodies(KeyChanged)) == 3)
    assert [body.value for body in probe.bodies(KeyChanged)] == [plan(1), None, plan(2)]


async def test_each_is_counted_and_the_first_of_a_key_is_an_alarm(bus: NatsHarness):
    probe = await watching(bus)
    for _ in range(3):
        await write(bus, "k", GARBAGE[0])
    await bus.until(lambda: len(probe.bodies(KeyUnreadable)) == 3)
    assert bus.refused() == 3
    [alarm] = [log for log in bus.logged.events if log.event == "key_unreadable"]
    assert (alarm.level, alarm.fields["bucket"], alarm.fields["key"]) == ("error", "plan", "k")


async def test_a_watch_that_begins_beside_such_a_value_is_ready_and_tells_of_it(bus: NatsHarness):
    await watching(bus)
    await write(bus, "k", GARBAGE[0])
    late = await bus.add(Probe("late", WatchKeys(bucket="plan")))
    await bus.until(lambda: late.bodies(BucketReady))
    assert [type(body) for body in late.bodies()] == [KeyUnreadable, BucketReady]
