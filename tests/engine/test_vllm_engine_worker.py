"""Real vLLM workers, forked by a worker fork server, over a real nats-server: decode, break, kill, drain."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from millrace.contracts.ingress import FinishReason, ReturnReason, TokensResent
from millrace.contracts.status import InstanceRecord
from millrace.contracts.worker import (
    CancelSequence,
    ResendTokens,
    Sampling,
    SequenceAccepted,
    SequenceRefused,
    StructuredOutput,
)
from millrace.supervision.worker_fork_client import ForkFailed, WorkerForkClient

from tests.testbed import tiny_llama
from tests.testbed.nats_process import NatsProcess
from tests.testbed.programs import start_program
from tests.testbed.worker_rig import PATIENCE_S, FakeIngress, create_buckets, ended, write_config

#: Starting engines takes a minute where other test runs share the cores.
pytestmark = pytest.mark.timeout(300)

CLUSTER = "workers"
PROMPT = [7, 11, 13, 17, 19, 23, 29, 31]
GREEDY = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)


class ForkedWorkers:
    """A worker fork server with workers ``w0`` and ``w1``; each test (re)starts what it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nats = NatsProcess(folder)
        self.nats.start()
        asyncio.run(create_buckets(self.nats.url, CLUSTER))
        model = tiny_llama.build(folder / "llama", layers=2)
        for index in range(2):
            write_config(
                folder,
                f"w{index}",
                self.nats.url,
                CLUSTER,
                model_path=str(model),
                dtype="float32",
                kv_bytes=64 << 20,
                max_num_seqs=8,
                max_num_batched_tokens=128,
                enforce_eager=True,
                limits={"drain_limit_ms": 400, "linger_ms": 200},
            )
        with (folder / "worker-fork-server.log").open("ab") as log:
            self.process = start_program(
                "services.worker.fork_server", ["--socket", str(folder / "z.sock")], output=log
            )
        self.pids: dict[str, int] = {}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=PATIENCE_S)
        self.nats.close()


class Rig:
    """One test's connection to the fork server and to the bus."""

    def __init__(self, fork_server: ForkedWorkers, client: WorkerForkClient, ingress: FakeIngress) -> None:
        self.fork_server, self.client, self.ingress = fork_server, client, ingress
        self.exits: dict[int, int] = {}

    async def ensure(self, *names: str) -> None:
        """Starts those workers that do not run, and waits for them."""
        missing = [name for name in names if name not in self.fork_server.pids or ended(self.fork_server.pids[name])]
        for name in missing:
            folder = self.fork_server.folder
            self.fork_server.pids[name] = await self.client.fork(
                folder / f"{name}.json", log=folder / f"{name}.log", cores=[]
            )
        await self.ingress.up(*names)

    async def engine_pid(self, name: str) -> int:
        jetstream = self.ingress._nats.jetstream()
        bucket = await jetstream.key_value(self.ingress.subjects.bucket("instance"))
        from millrace.contracts.codec import decode

        record = decode((await bucket.get(name)).value or b"")
        assert isinstance(record, InstanceRecord)
        assert record.pid == self.fork_server.pids[name]
        return record.engine_pid

    async def gone(self, pid: int) -> None:
        await self.ingress.until(lambda: ended(pid))

    def alone(self) -> int:
        return len(self.exits)


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedWorkers]:
    fork_server = ForkedWorkers(tmp_path_factory.mktemp("worker-fork-server"))
    yield fork_server
    fork_server.close()


@pytest.fixture
async def rig(fork_server: ForkedWorkers) -> AsyncIterator[Rig]:
    exits: dict[int, int] = {}
    client = WorkerForkClient(fork_server.folder / "z.sock", on_exit=exits.__setitem__)
    await client.connect()
    async with FakeIngress(fork_server.nats.url, CLUSTER) as ingress:
        rig = Rig(fork_server, client, ingress)
        rig.exits = exits
        yield rig
    await client.close()


async def _decoded(rig: Rig, instance: str, sequence: str, sampling: Sampling = GREEDY) -> list[int]:
    assert isinstance(await rig.ingress.submit(instance, sequence, PROMPT, sampling), SequenceAccepted)
    (stream,) = await rig.ingress.finished(sequence)
    return stream.tokens


async def test_two_workers_decode_the_same_and_say_what_they_are(rig: Rig) -> None:
    await rig.ensure("w0", "w1")
    one, other = await _decoded(rig, "w0", "same.0"), await _decoded(rig, "w1", "same.1")
    assert one == other
    assert len(one) == 200
    await rig.ingress.until(lambda: {"w0", "w1"} <= set(rig.ingress.summaries))
    await rig.ingress.until(lambda: rig.ingress.summaries["w0"].output_tokens_total >= 200)
    assert rig.ingress.snapshots["w0"].blocks_total == rig.ingress.summaries["w0"].blocks_free


async def test_a_bad_parameter_is_refused_in_vllms_words(rig: Rig) -> None:
    await rig.ensure("w0")
    refused = await rig.ingress.submit("w0", "bad.0", PROMPT, Sampling(max_tokens=5, top_p=3.0))
    assert isinstance(refused, SequenceRefused)
    assert "top_p" in refused.detail


async def test_a_cancel_over_the_bus_frees_the_blocks(rig: Rig) -> None:
    await rig.ensure("w0")
    await rig.ingress.submit("w0", "hang.0", PROMPT, Sampling(max_tokens=900, ignore_eos=True))
    await rig.ingress.until(lambda: len(rig.ingress.streams["hang.0"].tokens) > 3)
    await rig.ingress.publish(rig.ingress.subjects.engine("w0", "cancel"), CancelSequence(sequence="hang.0", epoch=0))
    await rig.ingress.until(
        lambda: (s := rig.ingress.snapshots["w0"]).blocks_free == s.blocks_total and not s.running, patience_s=5
    )
    heard = len(rig.ingress.streams["hang.0"].tokens)
    await asyncio.sleep(0.2)
    assert len(rig.ingress.streams["hang.0"].tokens) == heard


async def test_tokens_are_resent_until_they_are_acknowledged(rig: Rig) -> None:
    await rig.ensure("w0")
    tokens = await _decoded(rig, "w0", "resend.0")
    subject = rig.ingress.subjects.engine("w0", "resend")
    answer = await rig.ingress.request(subject, ResendTokens(sequence="resend.0", epoch=0, from_index=150))
    assert isinstance(answer, TokensResent)
    assert (answer.chunk.token_ids, answer.chunk.finish) == (tokens[150:], FinishReason.LENGTH)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(max_tokens=200, seed=4, ignore_eos=True, frequency_penalty=0.5),
        Sampling(
            max_tokens=200, seed=4, ignore_eos=True, structured=StructuredOutput(regex="[a-f]{150,200}"), logprobs=2
        ),
    ],
    ids=["greedy", "seeded", "regex"],
)
async def test_kill_9_of_a_worker_ends_its_engine_and_the_stream_goes_on_elsewhere(
    rig: Rig, sampling: Sampling, request: pytest.FixtureRequest
) -> None:
    await rig.ensure("w0", "w1")
    name = request.node.callspec.id
    expected = await _decoded(rig, "w1", f"whole-{name}.0", sampling)
    engine = await rig.engine_pid("w0")
    await rig.ingress.submit("w0", f"broken-{name}.0", PROMPT, sampling)
    stream = rig.ingress.streams[f"broken-{name}.0"]
    await rig.ingress.until(lambda: len(stream.tokens) > 20)
    os.kill(rig.fork_server.pids["w0"], signal.SIGKILL)
    await rig.gone(engine)
    await rig.ingress.until(lambda: rig.exits.get(rig.fork_server.pids["w0"]) == -signal.SIGKILL)
    assert stream.finish is None
    assert isinstance(await rig.ingress.continue_on("w1", f"broken-{name}.0"), SequenceAccepted)
    await rig.ingress.finished(f"broken-{name}.0")
    assert stream.tokens == expected
    assert stream.gaps == 0


async def test_kill_9_of_an_engine_hands_its_sequences_back_at_once(rig: Rig) -> None:
    await rig.ensure("w0", "w1")
    await rig.ingress.submit("w0", "orphan.0", PROMPT, GREEDY)
    stream = rig.ingress.streams["orphan.0"]
    await rig.ingress.until(lambda: len(stream.tokens) > 20)
    worker, engine = rig.fork_server.pids["w0"], await rig.engine_pid("w0")
    os.kill(engine, signal.SIGKILL)
    await rig.ingress.until(lambda: bool(rig.ingress.returned), patience_s=3)
    returned = rig.ingress.returned[0]
    assert (returned.reason, returned.sequences) == (ReturnReason.ENGINE_DIED, [("orphan.0", 0)])
    await rig.ingress.until(lambda: worker in rig.exits)
    assert rig.exits[worker] == 1, "the supervisor must see that this was no orderly end"
    await rig.ingress.continue_on("w1", "orphan.0")
    await rig.ingress.finished("orphan.0")
    assert stream.tokens == await _decoded(rig, "w1", "orphan-whole.0")


async def test_sigterm_lets_short_work_finish_and_hands_back_the_rest(rig: Rig) -> None:
    await rig.ensure("w0", "w1")
    long = Sampling(max_tokens=900, temperature=0.0, ignore_eos=True)
    await rig.ingress.submit("w0", "long.0", PROMPT, long)
    await rig.ingress.submit("w0", "short.0", PROMPT, Sampling(max_tokens=5, temperature=0.0, ignore_eos=True))
    worker, engine = rig.fork_server.pids["w0"], await rig.engine_pid("w0")
    os.kill(worker, signal.SIGTERM)
    await rig.ingress.finished("short.0")
    late = await rig.ingress.submit("w0", "late.0", PROMPT, GREEDY)
    assert isinstance(late, SequenceRefused)
    assert late.reason == "draining"
    await rig.ingress.until(lambda: bool(rig.ingress.returned), patience_s=5)
    assert rig.ingress.returned[0].sequences == [("long.0", 0)]
    assert rig.ingress.returned[0].reason is ReturnReason.DRAINING
    await rig.ingress.until(lambda: worker in rig.exits)
    assert rig.exits[worker] == 0
    await rig.gone(engine)
    await rig.ingress.continue_on("w1", "long.0")
    (stream,) = await rig.ingress.finished("long.0")
    assert stream.tokens == await _decoded(rig, "w1", "long-whole.0", long)


async def test_a_missing_configuration_is_told(rig: Rig) -> None:
    with pytest.raises(ForkFailed, match="no such file"):
        await rig.client.fork(rig.fork_server.folder / "nothing.json")


async def test_when_the_fork_server_is_killed_its_workers_and_engines_end(rig: Rig) -> None:
    """Last in this file: the fork server is gone afterwards."""
    await rig.ensure("w1")
    worker, engine = rig.fork_server.pids["w1"], await rig.engine_pid("w1")
    rig.fork_server.process.kill()
    await rig.gone(worker)
    await rig.gone(engine)
