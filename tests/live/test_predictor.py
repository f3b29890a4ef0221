"""A predictor process on a real nats-server, beside workers with modelled engines."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from millrace.contracts.observers import DecisionMade
from millrace.contracts.predictor import LatencyPrediction, NoPrediction, NoPredictionReason, PredictLatency
from millrace.contracts.worker import Sampling, SequenceAccepted, SubmitSequence
from nats.errors import NoRespondersError

from tests.testbed.nats_process import NatsProcess
from tests.testbed.programs import Program, start_program
from tests.testbed.worker_rig import PATIENCE_S, FakeIngress, Stream, create_buckets, start_worker, write_config

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT = list(range(1, 65))
LIMITS = {"max_model_len": 4096, "kv_blocks": 2048, "block_size": 16, "max_num_seqs": 8, "enable_prefix_caching": False}


class Cluster:
    """A worker process with two modelled instances, and predictor processes."""

    def __init__(self, folder: Path, server: NatsProcess, name: str) -> None:
        self.folder, self.name, self.url = folder, name, server.url
        asyncio.run(create_buckets(server.url, name))
        self.processes: list[Program] = []

    def start_worker(self, name: str = "w", coefficients: str = "cpu-8m", **fields: Any) -> None:
        fields = LIMITS | {"modelled": {"coefficients": coefficients}} | fields
        config = write_config(
            self.folder,
            name,
            self.url,
            self.name,
            engine="modelled",
            instances=2,
            **fields,
        )
        self.processes.append(start_worker(config))

    def start_predictor(self, name: str = "predictor-0", **fields: Any) -> Program:
        path = self.folder / f"{name}.json"
        bus = {"cluster": self.name, "servers": [self.url]}
        path.write_text(json.dumps({"name": name, "bus": bus, **fields}))
        with path.with_suffix(".log").open("wb") as log:
            process = start_program("services.predictor", ["--config", str(path)], output=log)
        self.processes.append(process)
        return process

    def ingress(self) -> Asking:
        return Asking(self.url, self.name)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=10)
        for log in self.folder.glob("*.log"):
            assert "actor_crashed" not in log.read_text(), log.name


class Asking(FakeIngress):
    """An ingress that asks predictors, and says where it placed what."""

    async def __aenter__(self) -> Asking:
        await super().__aenter__()
        return self

    async def predict(self, instance: str, *, tokens: int, model: str = "m", **fields: Any) -> Any:
        """The answer about a request of PROMPT and ``tokens`` of output."""
        body = PredictLatency(
            request="q",
            instance=instance,
            model=model,
            prompt_tokens=len(PROMPT),
            max_tokens=tokens,
            expected_output_tokens=float(tokens),
        )
        return await self.request(self.subjects.predict(model, instance), body, **fields)

    async def until_answered(self, instance: str) -> None:
        """Waits until a predictor has heard of the instance."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    answer = await self.predict(instance, tokens=10)
                    if not (isinstance(answer, NoPrediction) and answer.reason is NoPredictionReason.NO_SNAPSHOT):
                        return
                except NoRespondersError:
                    pass
                await asyncio.sleep(0.05)

    async def predicted(self, instance: str, *, tokens: int) -> LatencyPrediction:
        """Asks until there is a prediction."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    answer = await self.predict(instance, tokens=tokens)
                except NoRespondersError:
                    answer = None
                if isinstance(answer, LatencyPrediction):
                    return answer
                await asyncio.sleep(0.05)

    async def place(self, instance: str, request: str, tokens: int) -> None:
        """Decides and submits, as ingress does."""
        decision = DecisionMade(
            request=request,
            sequences=[f"{request}.0"],
            epoch=0,
            kind="dispatch",
            policy="by_hand",
            model="m",
            chosen=instance,
            reason="",
            at_ns=time.time_ns(),
            prompt_tokens=len(PROMPT),
            max_tokens=tokens,
            expected_output_tokens=float(tokens),
        )
        await self.publish(self.subjects.decision("m"), decision)
        stream = Stream(PROMPT, Sampling(max_tokens=tokens, ignore_eos=True))
        self.streams[f"{request}.0"] = stream
        submit = SubmitSequence(
            sequence=f"{request}.0",
            epoch=0,
            ingress=self.name,
            ingress_incarnation=self.incarnation,
            prompt_token_ids=stream.prompt,
            sampling=stream.sampling,
            expected_output_tokens=tokens,
        )
        assert isinstance(await self.request(self.subjects.engine(instance, "submit"), submit), SequenceAccepted)


@pytest.fixture
def cluster(tmp_path: Path, nats_server: NatsProcess, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, nats_server, f"predictor-{request.node.name[5:25]}")
    yield cluster
    cluster.close()


async def test_replicas_share_the_questions_and_one_is_enough(cluster: Cluster) -> None:
    cluster.start_worker()
    first = cluster.start_predictor("predictor-0")
    cluster.start_predictor("predictor-1")
    async with cluster.ingress() as ingress:
        await ingress.up("w-0")
        await ingress.predicted("w-0", tokens=10)
        first.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait, 10) == 0
        answers = [await ingress.predicted("w-0", tokens=10) for _ in range(20)]
    assert {answer.instance for answer in answers} == {"w-0"}


async def test_shards_serve_their_own_instances_and_nobody_answers_for_strangers(cluster: Cluster) -> None:
    cluster.start_worker()
    cluster.start_predictor("predictor-0", shard=0, shards=2)
    cluster.start_predictor("predictor-1", shard=1, shards=2)
    async with cluster.ingress() as ingress:
        assert (await ingress.predicted("w-0", tokens=10)).instance == "w-0"
        assert (await ingress.predicted("w-1", tokens=10)).instance == "w-1"
        with pytest.raises(NoRespondersError):
            await ingress.predict("stranger", tokens=10)


async def test_where_the_step_time_set_cannot_be_read_steps_are_learnt_from_snapshots(cluster: Cluster) -> None:
    cluster.start_worker(limits={"status_interval_min_ms": 0})
    cluster.start_predictor(step_times={"cpu-8m": str(cluster.folder / "missing.toml")})
    async with cluster.ingress() as ingress:
        await ingress.up("w-0")
        await ingress.until_answered("w-0")
        answer = await ingress.predict("w-0", tokens=10)
        assert answer.reason is NoPredictionReason.NO_STEP_TIME
        for index in range(12):
            await ingress.place("w-0", f"r{index}", 40 + index)
            await asyncio.sleep(0.03)
        await ingress.finished(*(f"r{index}.0" for index in range(12)))
        await ingress.predicted("w-0", tokens=150)
    log = (cluster.folder / "predictor-0.log").read_text()
    assert log.count("step_time_unreadable") == log.count("step_time_unknown") == 1
