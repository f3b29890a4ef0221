"""Real vLLM workers over a real nats-server: decode, break, kill, drain."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from millrace.contracts.ingress import ReturnReason
from millrace.contracts.status import InstanceRecord
from millrace.contracts.worker import (
    CancelSequence,
    Sampling,
    SequenceAccepted,
    SequenceRefused,
    StructuredOutput,
)

from tests.testbed import tiny_llama
from tests.testbed.nats_process import NatsProcess
from tests.testbed.programs import Program, start_program
from tests.testbed.worker_rig import PATIENCE_S, FakeIngress, create_buckets, ended, write_config

CLUSTER = "workers"
PROMPT = [7, 11, 13, 17, 19, 23, 29, 31]
GREEDY = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)


class Workers:
    """Workers ``w0`` and ``w1``, forked from a process that has vLLM imported; each test (re)starts what it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nats = NatsProcess(folder)
        self.nats.start()
        asyncio.run(create_buckets(self.nats.url, CLUSTER))
        model = tiny_llama.build(folder / "llama")
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
        self.running: dict[str, Program] = {}

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            arguments = ["--config", str(self.folder / f"{name}.json")]
            self.running[name] = start_program("services.worker", arguments, output=log, own_session=True)

    def close(self) -> None:
        for program in self.running.values():
            program.terminate()
            program.wait(timeout=PATIENCE_S)
        self.nats.close()


class Rig:
    """One test's view of the workers, and its connection to the bus."""

    def __init__(self, workers: Workers, ingress: FakeIngress) -> None:
        self.workers, self.ingress = workers, ingress

    async def ensure(self, *names: str) -> None:
        """Starts those workers that do not run, and waits for them."""
        for name in names:
            if name not in self.workers.running or self.workers.running[name].poll() is not None:
                self.workers.start(name)
        await self.ingress.up(*names)

    def pid(self, name: str) -> int:
        return self.workers.running[name].pid

    async def engine_pid(self, name: str) -> int:
        jetstream = self.ingress._nats.jetstream()
        bucket = await jetstream.key_value(self.ingress.subjects.bucket("instance"))
        from millrace.contracts.codec import decode

        record = decode((await bucket.get(name)).value or b"")
        assert isinstance(record, InstanceRecord)
        assert record.pid == self.pid(name)
        return record.engine_pid

    async def gone(self, pid: int) -> None:
        await self.ingress.until(lambda: ended(pid))

    async def exit_status(self, name: str) -> int | None:
        await self.ingress.until(lambda: self.workers.running[name].poll() is not None)
        return self.workers.running[name].returncode


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(tmp_path_factory.mktemp("workers"))
    yield workers
    workers.close()


@pytest.fixture
async def rig(workers: Workers) -> AsyncIterator[Rig]:
    async with FakeIngress(workers.nats.url, CLUSTER) as ingress:
        yield Rig(workers, ingress)


async def _decoded(rig: Rig, instance: str, sequence: str, sampling: Sampling = GREEDY) -> list[int]:
    assert isinstance(await rig.ingress.submit(instance, sequence, PROMPT, sampling), SequenceAccepted)
    (stream,) = await rig.ingress.finished(sequence)
    return stream.tokens


async def test_kill_9_of_a_worker_ends_its_engine_and_streams_go_on_elsewhere(rig: Rig) -> None:
    samplings = (
        GREEDY,
        Sampling(max_tokens=200, seed=4, ignore_eos=True, frequency_penalty=0.5),
        Sampling(
            max_tokens=200, seed=4, ignore_eos=True, structured=StructuredOutput(regex="[a-f]{150,200}"), logprobs=2
        ),
    )
    await rig.ensure("w0", "w1")
    for number, sampling in enumerate(samplings):
        await rig.ingress.submit("w1", f"whole.{number}", PROMPT, sampling)
    whole = await rig.ingress.finished(*(f"whole.{number}" for number in range(3)))
    engine = await rig.engine_pid("w0")
    for number, sampling in enumerate(samplings):
        await rig.ingress.submit("w0", f"broken.{number}", PROMPT, sampling)
    streams = [rig.ingress.streams[f"broken.{number}"] for number in range(3)]
    await rig.ingress.until(lambda: all(len(stream.tokens) > 20 for stream in streams))
    os.kill(rig.pid("w0"), signal.SIGKILL)
    await rig.gone(engine)
    assert await rig.exit_status("w0") == -signal.SIGKILL
    assert not any(stream.finish for stream in streams)
    for number in range(3):
        assert isinstance(await rig.ingress.continue_on("w1", f"broken.{number}"), SequenceAccepted)
    await rig.ingress.finished(*(f"broken.{number}" for number in range(3)))
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in whole]
    assert not any(stream.gaps for stream in streams)


async def test_kill_9_of_an_engine_hands_its_sequences_back_at_once(rig: Rig) -> None:
    await rig.ensure("w0", "w1")
    await rig.ingress.submit("w0", "orphan.0", PROMPT, GREEDY)
    stream = rig.ingress.streams["orphan.0"]
    await rig.ingress.until(lambda: len(stream.tokens) > 20)
    engine = await rig.engine_pid("w0")
    os.kill(engine, signal.SIGKILL)
    await rig.ingress.until(lambda: bool(rig.ingress.returned), patience_s=3)
    returned = rig.ingress.returned[0]
    assert (returned.reason, returned.sequences) == (ReturnReason.ENGINE_DIED, [("orphan.0", 0)])
    assert await rig.exit_status("w0") == 1, "the supervisor must see that this was no orderly end"
    await rig.ingress.continue_on("w1", "orphan.0")
    await rig.ingress.finished("orphan.0")
    assert stream.tokens == await _decoded(rig, "w1", "orphan-whole.0")


async def test_sigterm_lets_short_work_finish_and_hands_back_the_rest(rig: Rig) -> None:
    await rig.ensure("w0", "w1")
    long = Sampling(max_tokens=900, temperature=0.0, ignore_eos=True)
    await rig.ingress.submit("w0", "long.0", PROMPT, long)
    await rig.ingress.submit("w0", "short.0", PROMPT, Sampling(max_tokens=5, temperature=0.0, ignore_eos=True))
    engine = await rig.engine_pid("w0")
    os.kill(rig.pid("w0"), signal.SIGTERM)
    await rig.ingress.finished("short.0")
    late = await rig.ingress.submit("w0", "late.0", PROMPT, GREEDY)
    assert isinstance(late, SequenceRefused)
    assert late.reason == "draining"
    await rig.ingress.until(lambda: bool(rig.ingress.returned), patience_s=5)
    assert rig.ingress.returned[0].sequences == [("long.0", 0)]
    assert rig.ingress.returned[0].reason is ReturnReason.DRAINING
    assert await rig.exit_status("w0") == 0
    await rig.gone(engine)
    known = len(rig.ingress.streams["long.0"].tokens)
    await rig.ingress.continue_on("w1", "long.0")
    stream = rig.ingress.streams["long.0"]
    await rig.ingress.until(lambda: len(stream.tokens) >= known + 100)
    await rig.ingress.publish(rig.ingress.subjects.engine("w1", "cancel"), CancelSequence(sequence="long.0", epoch=1))
    tokens = stream.tokens[: known + 100]
    as_alone = Sampling(max_tokens=len(tokens), temperature=0.0, ignore_eos=True)
    assert tokens == await _decoded(rig, "w1", "long-whole.0", as_alone)
