"""NatsRuntime as a process: how it starts, stops, crashes, records, and what it counts."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from millrace.actor import connection
from millrace.actor.cell import ActorCrashed, HostingTerms
from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Log, Publish, Request, StartTimer, Subscribe, Unsubscribe, WatchKeys
from millrace.actor.errors import BusRefused, BusUnavailable
from millrace.actor.nats_client import settle
from millrace.actor.runtime_nats import NatsRuntime
from millrace.contracts.local import BucketReady, BusDisconnected, BusReconnected, RequestFailed, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.tagger import LengthTag, TagRequest
from prometheus_client import CollectorRegistry, generate_latest

from tests.contract.bus.harness import Logged
from tests.contract.bus.probe import Do, Probe
from tests.testbed.nats_process import NatsProcess
from tests.testbed.waiting import until

SECOND = 1_000_000_000
FOREVER_S = 20.0


def runtime_at(url: str, logged: Logged | None = None, registry: CollectorRegistry | None = None) -> NatsRuntime:
    bus = BusConfig(cluster="runtime", servers=[url])
    return NatsRuntime(bus=bus, name="test", telemetry=logged or Logged(), registry=registry or CollectorRegistry())


class Breaks(Probe):
    """Has a bug."""

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        assert not isinstance(message.body, TimerFired), "two and two are five"
        return []

    def snapshot(self) -> dict[str, Any]:
        return {"sums": [2, 2, 5]}


async def test_a_bug_in_a_handler_ends_the_process_and_logs_the_actors_state(nats_server: NatsProcess):
    logged = Logged()
    runtime = runtime_at(nats_server.url, logged)
    await runtime.connect()
    runtime.add(Breaks("broken", StartTimer(name="now", at_ns=0)), accepts=())
    with pytest.raises(ActorCrashed, match="two and two are five"):
        await asyncio.wait_for(runtime.run(), FOREVER_S)
    [line] = [event for event in logged.events if event.event == "actor_crashed"]
    assert line.fields["snapshot"] == {"sums": [2, 2, 5]}


async def test_a_bug_in_a_hosted_actor_ends_it_alone_and_questions_to_it_find_nobody(nats_server: NatsProcess):
    logged, crashes = Logged(), []
    bus = BusConfig(cluster="runtime", servers=[nats_server.url])
    runtime = NatsRuntime(bus=bus, name="test", telemetry=logged, registry=CollectorRegistry(), local=True)
    await runtime.connect()
    terms = HostingTerms(on_crash=lambda: crashes.append("broken"))
    hosted = Breaks("broken", Subscribe(subject="mr.runtime.tag.m"), StartTimer(name="now", at_ns=0))
    runtime.add(hosted, accepts=(TagRequest,), terms=terms)
    own = Probe("own")
    handle = runtime.add(own, accepts=())
    running = asyncio.create_task(runtime.run(signals=False))
    await until(lambda: crashes)
    assert [event.event for event in logged.events] == ["actor_crashed"]
    body = TagRequest(request="r", model="m", prompt_tokens=1, max_tokens=1)
    ask = Request(subject="mr.runtime.tag.m", body=body, correlation="c", timeout_ns=60 * SECOND)
    handle.deliver(Do(effects=[ask]))
    await until(lambda: own.bodies(RequestFailed))
    runtime.request_stop()
    assert await asyncio.wait_for(running, FOREVER_S) == "asked"


async def test_what_two_actors_of_a_process_hear_comes_once_and_to_each_as_long_as_it_listens(nats_server: NatsProcess):
    hearing, speaking = runtime_at(nats_server.url), runtime_at(nats_server.url)
    probes, speaker = [Probe(name, Subscribe(subject="mr.runtime.tag.*")) for name in ("a", "b")], Probe("c")
    body = TagRequest(request="r", model="m", prompt_tokens=1, max_tokens=1)
    publish = Do(effects=[Publish(subject="mr.runtime.tag.m", body=body)])
    for runtime in (hearing, speaking):
        await runtime.connect()
    handles = [hearing.add(probe, accepts=(TagRequest,)) for probe in probes]
    said = speaking.add(speaker, accepts=())
    running = [asyncio.create_task(runtime.run(signals=False)) for runtime in (hearing, speaking)]
    await settle(hearing._connection.client)
    assert [subject for subject, _ in hearing._connection.client._wanted.values()].count("mr.runtime.tag.*") == 1

    def heard() -> list[int]:
        return [len(probe.bodies(TagRequest)) for probe in probes]

    said.deliver(publish)
    await until(lambda: heard() == [1, 1])
    handles[0].deliver(Do(effects=[Unsubscribe(subject="mr.runtime.tag.*")]))
    said.deliver(publish)
    await until(lambda: heard() == [1, 2])
    for runtime in (hearing, speaking):
        runtime.request_stop()
    await asyncio.gather(*running)


async def test_sigterm_asks_every_actor_and_the_runtime_ends_with_the_last(nats_server: NatsProcess):
    runtime = runtime_at(nats_server.url)
    await runtime.connect()
    for name in ("one", "two"):
        runtime.add(Probe(name), accepts=())
    running = asyncio.create_task(runtime.run())
    await until(lambda: signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, FOREVER_S) == "asked"


async def test_effects_before_a_stop_still_leave(nats_server: NatsProcess):
    hearer = Probe("hearer", Subscribe(subject="mr.runtime.bye"))
    keeps = runtime_at(nats_server.url)
    await keeps.connect()
    keeps.add(hearer, accepts=(LengthTag,))
    running = asyncio.create_task(keeps.run(signals=False))
    leaver = runtime_at(nats_server.url)
    await leaver.connect()
    messages = [Publish(subject="mr.runtime.bye", body=LengthTag(request=str(index))) for index in range(5000)]
    leaver.add(Probe("leaver", *messages), accepts=())
    leaving = asyncio.create_task(leaver.run(signals=False))
    await asyncio.sleep(0)
    leaver.request_stop()
    await asyncio.wait_for(leaving, FOREVER_S)
    await until(lambda: len(hearer.got) == 5000)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_no_server_is_said_after_a_while(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int):
    monkeypatch.setattr(connection, "CONNECT_S", 0.5)
    with pytest.raises(BusUnavailable, match=r"no NATS server at nats://127.*: .*Connect call failed"):
        await runtime_at(f"nats://127.0.0.1:{unused_tcp_port}").connect()


async def test_a_wrong_password_is_said_at_once(tmp_path: Path):
    server = NatsProcess(tmp_path, "authorization { users: [ { user: ingress, password: right } ] }")
    server.start()
    try:
        bus = BusConfig(cluster="runtime", servers=[server.url], user="ingress", password="wrong")
        runtime = NatsRuntime(bus=bus, name="test", telemetry=Logged(), registry=CollectorRegistry())
        with pytest.raises(BusRefused, match="refused user 'ingress'"):
            await asyncio.wait_for(runtime.connect(), 5)
    finally:
        server.close()


async def test_a_connection_that_the_server_ends_with_an_error_is_opened_anew_with_its_subscriptions_and_watches(
    nats_server: NatsProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "REOPEN_S", 0.05)
    runtime = runtime_at(nats_server.url)
    await runtime.connect()
    probe = Probe("probe", Subscribe(subject="mr.runtime.again"), WatchKeys(bucket="plan"))
    runtime.add(probe, accepts=(LengthTag,))
    running = asyncio.create_task(runtime.run(signals=False))
    await until(lambda: probe.bodies(BucketReady))
    over_the_limit = b"x" * 2_000_000  # nats-server ends a connection for this
    runtime._connection.client.publish_now("mr.runtime.again", "", b"NATS/1.0\r\n\r\n", over_the_limit)
    await until(lambda: len(probe.bodies(BucketReady)) == 2)
    assert [type(body) for body in probe.bodies()[1:3]] == [BusDisconnected, BusReconnected]
    speaker = Probe("speaker", Publish(subject="mr.runtime.again", body=LengthTag(request="r")))
    runtime.add(speaker, accepts=())
    await until(lambda: probe.bodies(LengthTag))
    runtime.request_stop()
    await running


async def test_what_was_handled_refused_and_dropped_is_counted(nats_server: NatsProcess):
    registry = CollectorRegistry()
    logged = Logged()
    runtime = runtime_at(nats_server.url, logged, registry)
    await runtime.connect()
    probe = Probe("probe", Subscribe(subject="mr.runtime.count"))
    runtime.add(probe, accepts=(LengthTag,))
    wrong = TagRequest(request="r", model="m", prompt_tokens=1, max_tokens=1)
    runtime.add(
        Probe(
            "speaker",
            *[Publish(subject="mr.runtime.count", body=wrong)] * 3,
            *[Publish(subject="mr.runtime.count", body=LengthTag(request="r"))] * 200,
        ),
        accepts=(),
    )
    running = asyncio.create_task(runtime.run(signals=False))
    await until(lambda: len(probe.got) == 200)
    text = generate_latest(registry).decode()
    assert 'millrace_actor_handled_total{actor="probe",type="LengthTag"} 200.0' in text
    assert 'millrace_actor_refused_total{actor="probe",kind="unexpected"} 3.0' in text
    assert 'millrace_actor_handle_seconds_count{actor="probe"} 3.0' in text
    assert "millrace_bus_connected 1.0" in text
    assert [event.event for event in logged.events if isinstance(event, Log)].count("message_refused") == 1
    runtime.request_stop()
    await running
