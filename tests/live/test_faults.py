"""Recovery without the loss of a request: a whole cluster with modelled engines, processes killed under load."""

import asyncio
import os
import random
import signal

import nats
from millrace.contracts.catalog import CHANNELS, Role
from millrace.contracts.codec import encode
from millrace.contracts.ingress import TokenChunk, TokensGenerated
from millrace.contracts.subjects import Subjects
from millrace.contracts.worker import CancelSequence

from tests.live.clusters import modelled_cluster
from tests.live.faults import PATIENCE_S, expect_identical, expected_outcomes, kill, told, under_fire
from tests.testbed.timed_streams import client, until_answered
from tests.testbed.up_cluster import UpRig, prompt_text, stream

LENGTH = {"max_tokens": 60}
#: A stream takes about a second: ten of them run at any moment.
SLOW = {"modelled": {"speed": 0.3}, "limits": {"ingress_silence_ms": 2_000}}
LOAD = {"rate": 10.0, "seconds": 3.0}


#: Two worker processes with two engines each: killing one leaves somewhere to go.
rig = modelled_cluster("--processes", "2", "--set", "services.hosted_instances_max=0", worker=SLOW)


async def test_a_second_up_says_that_one_runs(rig: UpRig) -> None:
    again = rig.again()
    assert again.returncode == 1
    assert "already running" in again.stderr
    assert rig.url in again.stderr


async def test_services_run_on_and_come_back_without_their_fork_server(rig: UpRig) -> None:
    expected = await expected_outcomes(rig, **LENGTH)
    others = {pid for name in ("services.coordinator", "worker-0.json") for pid in rig.pids(name)}
    for pid in rig.pids("millrace: fork server"):
        kill(pid)
    results = await under_fire(rig, lambda: kill(rig.pids("services.tagger")[0]), shots=1, **LOAD, **LENGTH)
    expect_identical(results, expected)
    await rig.well(2)
    assert others <= {process.pid for process in rig.processes()}
    assert rig.pids("services.tagger")
    assert "services start slower from here on" in rig.output()


async def test_an_ingress_that_was_killed_is_back_and_workers_cancel_its_orphans(rig: UpRig) -> None:
    async with client(60) as http:
        orphan = asyncio.create_task(stream(http, rig, prompt_text(1), max_tokens=1500, ignore_eos=True))
        await told(rig, running=1)
        kill(rig.pids("services.ingress")[0])
        assert (await orphan).error
        await until_answered(f"{rig.url}/ready", PATIENCE_S)
    await told(rig, running=0, waiting=0)
    assert not (await under_fire(rig, lambda: None, seconds=0.5, shots=0, **LENGTH))[0][1].error


async def test_an_ingress_that_stands_still_again_and_again_loses_its_sequences_once(rig: UpRig) -> None:
    (pid,) = rig.pids("ingress-0.json")
    lost = []
    async with client(120) as http:
        fields = {"max_tokens": 800, "ignore_eos": True}
        asked = [asyncio.create_task(stream(http, rig, prompt_text(n), **fields)) for n in range(4)]
        for _ in range(2):
            await told(rig, running=4)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(3)
            os.kill(pid, signal.SIGCONT)
            await told(rig, running=4)
            lost.append(await rig.metric("millrace_ingress_continuations_total", 'reason="tokens_forgotten"'))
        assert [(each.tokens, each.error) for each in await asyncio.gather(*asked)] == [(800, "")] * 4
    assert lost[1] == lost[0]


async def test_strangers_bytes_on_every_subject_change_nothing(rig: UpRig) -> None:
    expected = await expected_outcomes(rig, **LENGTH)
    before = {what: rig.pids(what) for what in ("services.ingress", "worker-0.json", "services.tagger")}

    async def shower() -> None:
        for role in Role:
            await _shower(rig, role)

    noise = asyncio.create_task(shower())
    results = await under_fire(rig, lambda: None, shots=0, **LOAD, **LENGTH)
    await noise
    expect_identical(results, expected)
    assert {what: rig.pids(what) for what in before} == before
    assert await rig.metric("millrace_actor_refused_total") > 0


async def _shower(rig: UpRig, role: Role) -> None:
    """Random bytes, wrong versions and replayed messages from one user on all that it may publish to."""
    rng = random.Random(str(role))
    nats_text = (rig.folder / "run" / "nats.conf").read_text()
    password = nats_text.partition(f'user: {role}, password: "')[2].partition('"')[0]
    client = await nats.connect(rig.cluster_file()["nats_url"], user=str(role), password=password)
    subjects = Subjects(rig.cluster_file()["cluster"])
    wrong_version = encode(CancelSequence(sequence="x.0", epoch=9)).replace(b"CancelSequence/1", b"CancelSequence/9")
    chunk = TokenChunk("nobody.0", 0, 0, [1, 2, 3])
    stale = encode(TokensGenerated(instance="worker-0", incarnation=1, step=1, chunks=[chunk]))
    for channel in CHANNELS:
        if role not in channel.senders:
            continue
        for name in ("m", "worker-0", "worker-1", "ingress-0", "tagger-0"):
            tokens = [name if token.startswith("{") else token for token in channel.subject.split(".")]
            subject = ".".join([subjects.prefix, *tokens])
            for payload in (b"", os.urandom(0) + rng.randbytes(64), rng.randbytes(2000), wrong_version, stale):
                await client.publish(subject, payload, headers={"Mr-Type": "Nonsense/1"})
    await client.flush()
    await client.close()


async def test_down_takes_everything_down(rig: UpRig) -> None:
    """The last one: the cluster is gone then."""
    assert rig.process is not None
    processes = rig.processes()
    assert len(processes) >= 5
    assert "the cluster is down" in rig.cli("down")
    assert not [process for process in processes if process.is_running()]
    assert "no cluster runs" in rig.cli("down")
    rig.process.wait(PATIENCE_S)
    rig.process = None
