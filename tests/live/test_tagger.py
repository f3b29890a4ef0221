"""A tagger process on a real nats-server: it learns, trains beside itself, and remembers over a kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import nats
import pytest
from millrace.contracts.codec import decode, encode
from millrace.contracts.observers import RequestFinished
from millrace.contracts.subjects import Subjects
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.lengths.files import MODEL_FILE
from nats.aio.client import Client
from nats.errors import NoRespondersError

from tests.testbed.messages import plain
from tests.testbed.nats_process import NatsProcess
from tests.testbed.programs import Program, start_program
from tests.testbed.waiting import until

#: Longest wait for anything here, seconds.
PATIENCE_S = 60.0
LEARNING = {"pretrained": False, "retrain_outcomes": 250, "outcomes_min": 250, "retrain_pause_s": 0.0}


class Asking:
    """Stands in for an ingress: asks for lengths and says what they were."""

    def __init__(self, client: Client, cluster: str) -> None:
        self._client, self._subjects = client, Subjects(cluster)
        self._number = 0

    async def ask(self, prompt: str) -> LengthTag:
        """The tag of a request; waits for a tagger that is just starting."""
        self._number += 1
        body = TagRequest(request=f"i0-{self._number}", model="m.1", prompt_tokens=12, max_tokens=2000, prompt=prompt)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    tag = decode((await self._client.request(self._subjects.tag("m.1"), encode(body), timeout=10)).data)
                    assert isinstance(tag, LengthTag)
                    return tag
                except NoRespondersError:
                    await asyncio.sleep(0.05)

    async def count(self, rng: Random) -> LengthTag:
        """The tag of a request whose numbers decide its length, which is told then."""
        first, span = rng.randrange(100), rng.randrange(1, 300)
        tag = await self.ask(f"Count from {first} to {first + span}.")
        told = {"output_tokens": [max(1, round(span * rng.lognormvariate(0, 0.1)))], "finish_reasons": ["stop"]}
        body = plain(RequestFinished, request=f"i0-{self._number}", model="m.1", **told)
        await self._client.publish(self._subjects.outcome("m.1"), encode(body))
        return tag


@pytest.fixture
def start(tmp_path: Path, nats_server: NatsProcess, request: pytest.FixtureRequest) -> Iterator[Callable[[], Program]]:
    """Starts a tagger, and another one with its folder."""
    bus = {"cluster": request.node.name, "servers": [nats_server.url]}
    learning = LEARNING | {"directory": str(tmp_path / "lengths")}
    config, log = tmp_path / "tagger.json", tmp_path / "tagger.log"
    config.write_text(json.dumps({"bus": bus, "learning": learning, "name": "tagger-0"}))
    started: list[Program] = []

    def start() -> Program:
        with log.open("ab") as output:
            started.append(start_program("services.tagger", ["--config", str(config)], output=output))
        return started[-1]

    yield start
    started[-1].kill()
    started[-1].wait(timeout=10)
    assert "actor_crashed" not in log.read_text()


async def test_what_it_learnt_survives_a_kill(
    start: Callable[[], Program], tmp_path: Path, nats_server: NatsProcess, request: pytest.FixtureRequest
) -> None:
    rng, kept = Random(1), tmp_path / "lengths" / "m_1"
    tagger = start()
    async with await nats.connect(nats_server.url) as client, asyncio.timeout(2 * PATIENCE_S):
        ingress = Asking(client, request.node.name)
        for _ in range(250):
            await ingress.count(rng)
        while (await ingress.count(rng)).source != "model":  # noqa: ASYNC110 each turn asks
            await asyncio.sleep(0.01)
        await until((kept / MODEL_FILE).exists)
        await until((kept / "tagger-0.outcomes").exists)
        tagger.kill()
        tagger.wait(timeout=10)
        start()
        assert (await ingress.ask("Count from 1 to 9.")).source == "model"
