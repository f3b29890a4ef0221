"""Contract of both buses' key-value store: watches, compare-and-set, deletion, expiry, restarts."""

import pytest
from millrace.actor.effects import DeleteKey, PutKey, WatchKeys
from millrace.contracts.local import (
    BucketReady,
    BusDisconnected,
    BusReconnected,
    KeyChanged,
    KeyFailure,
    KeyNotPut,
    KeyPut,
)
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.status import InstanceRecord

from tests.contract.bus.harness import Harness
from tests.contract.bus.probe import Probe
from tests.testbed.messages import plain_record


def plan(epoch: int) -> Plan:
    return Plan(
        model="m", epoch=epoch, stages=[Stage(name="s0", length_min=0, length_max=None, instances=[])], coordinator="c"
    )


def put(key: str, epoch: int, expected: int | None = None) -> PutKey:
    name = f"{key}:{epoch}"
    return PutKey(bucket="plan", key=key, value=plan(epoch), correlation=name, expected_revision=expected)


def record(name: str) -> InstanceRecord:
    return plain_record(name, max_model_len=100, max_sequences=1, token_budget=1, block_size=1, blocks_total=1)


async def test_a_watch_tells_what_is_there_then_that_it_is_all_then_changes(bus: Harness):
    writer = await bus.add(Probe("writer"))
    bus.tell(writer, put("a", 1), put("b", 1), put("a", 2))
    await bus.until(lambda: len(writer.bodies(KeyPut)) == 3)
    watcher = await bus.add(Probe("watcher", WatchKeys(bucket="plan")))
    await bus.until(lambda: watcher.bodies(BucketReady))
    assert {(body.key, body.value.epoch) for body in watcher.bodies(KeyChanged)} == {("a", 2), ("b", 1)}
    assert watcher.bodies()[-1] == BucketReady(bucket="plan")
    bus.tell(writer, put("c", 5))
    await bus.until(lambda: len(watcher.got) == 4)
    revision = writer.bodies(KeyPut)[-1].revision
    assert watcher.bodies()[-1] == KeyChanged(bucket="plan", key="c", value=plan(5), revision=revision)


async def test_a_watch_of_an_empty_bucket_is_ready_at_once(bus: Harness):
    watcher = await bus.add(Probe("watcher", WatchKeys(bucket="plan")))
    await bus.until(lambda: watcher.got)
    assert watcher.bodies() == [BucketReady(bucket="plan")]


async def test_compare_and_set_takes_exactly_the_present_revision(bus: Harness):
    writer = await bus.add(Probe("writer"))
    bus.tell(writer, put("k", 1))
    await bus.until(lambda: writer.got)
    revision = writer.bodies(KeyPut)[0].revision
    bus.tell(writer, put("k", 2, expected=revision), put("k", 3, expected=revision), put("k", 4, expected=0))
    await bus.until(lambda: len(writer.got) == 4)
    assert [type(body) for body in writer.bodies()[1:]] == [KeyPut, KeyNotPut, KeyNotPut]
    assert {body.reason for body in writer.bodies(KeyNotPut)} == {KeyFailure.CONFLICT}


async def test_a_deleted_key_is_told_and_may_be_created_again(bus: Harness):
    probe = await bus.add(Probe("probe", WatchKeys(bucket="plan")))
    await bus.until(lambda: probe.bodies(BucketReady))
    bus.tell(probe, put("k", 1, expected=0))
    await bus.until(lambda: probe.bodies(KeyChanged))
    bus.tell(probe, DeleteKey(bucket="plan", key="k", correlation="delete"))
    await bus.until(lambda: len(probe.bodies(KeyChanged)) == 2)
    bus.tell(probe, put("k", 2, expected=0))
    await bus.until(lambda: len(probe.bodies(KeyChanged)) == 3)
    values = [body.value.epoch if body.value else None for body in probe.bodies(KeyChanged)]
    assert values == [1, None, 2]
    assert [body.correlation for body in probe.bodies(KeyPut)] == ["k:1", "delete", "k:2"]
    assert not probe.bodies(KeyNotPut)


async def test_deleting_at_an_older_revision_conflicts(bus: Harness):
    probe = await bus.add(Probe("probe"))
    bus.tell(probe, put("k", 1), put("k", 2))
    await bus.until(lambda: len(probe.got) == 2)
    old = probe.bodies(KeyPut)[0].revision
    bus.tell(probe, DeleteKey(bucket="plan", key="k", correlation="delete", expected_revision=old))
    await bus.until(lambda: len(probe.got) == 3)
    assert probe.bodies()[-1] == KeyNotPut(correlation="delete", reason=KeyFailure.CONFLICT)


async def test_a_key_of_a_bucket_with_a_ttl_expires_unless_it_is_put_again(bus: Harness):
    probe = await bus.add(Probe("probe", WatchKeys(bucket="instance")))
    await bus.until(lambda: probe.bodies(BucketReady))
    for name in ("dies", "stays"):
        bus.tell(probe, PutKey(bucket="instance", key=name, value=record(name), correlation=name))
    await bus.passes(6)
    bus.tell(probe, PutKey(bucket="instance", key="stays", value=record("stays"), correlation="again"))
    await bus.until(lambda: any(body.value is None for body in probe.bodies(KeyChanged)))
    assert [body.key for body in probe.bodies(KeyChanged) if body.value is None] == ["dies"]


async def test_writes_fail_while_the_bus_is_away(bus: Harness):
    probe = await bus.add(Probe("probe"))
    await bus.stop_bus()
    await bus.until(lambda: probe.bodies(BusDisconnected))
    bus.tell(probe, put("k", 1))
    await bus.until(lambda: probe.bodies(KeyNotPut))
    assert probe.bodies(KeyNotPut) == [KeyNotPut(correlation="k:1", reason=KeyFailure.UNAVAILABLE)]


@pytest.mark.parametrize("kept", [True, False])
async def test_a_watch_begins_anew_after_a_restart_that_keeps_or_loses_the_store(bus: Harness, kept: bool):
    writer = await bus.add(Probe("writer"))
    watcher = await bus.add(Probe("watcher", WatchKeys(bucket="plan")))
    bus.tell(writer, put("a", 1))
    await bus.until(lambda: watcher.bodies(KeyChanged) and writer.bodies(KeyPut))
    await bus.stop_bus(keep_store=kept)
    await bus.until(lambda: watcher.bodies(BusDisconnected) and writer.bodies(BusDisconnected))
    await bus.start_bus()
    await bus.until(lambda: len(watcher.bodies(BucketReady)) == 2 and writer.bodies(BusReconnected))
    told = watcher.bodies(BusReconnected, KeyChanged, BucketReady)
    assert [type(body) for body in told[-3:]] == [BusReconnected, KeyChanged, BucketReady]
    before, after = watcher.bodies(KeyChanged)
    assert after == before if kept else (after.key, after.value) == ("a", None)
    await _write_until_taken(bus, writer, "b")
    await bus.until(lambda: len(watcher.bodies(KeyChanged)) >= 3)
    assert watcher.bodies(KeyChanged)[-1].value == plan(9)


async def _write_until_taken(bus: Harness, writer: Probe, key: str) -> None:
    """Right after a restart the store may not take writes yet; an actor tries again, and so does this."""
    for _ in range(20):
        answered = len(writer.bodies(KeyPut, KeyNotPut))
        bus.tell(writer, put(key, 9))
        await bus.until(lambda: len(writer.bodies(KeyPut, KeyNotPut)) > answered)  # noqa: B023 awaited here
        if isinstance(writer.bodies(KeyPut, KeyNotPut)[-1], KeyPut):
            return
        await bus.passes(0.25)
    raise AssertionError("the store takes no writes")
