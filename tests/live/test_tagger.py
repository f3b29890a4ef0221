"""A tagger process on a real nats-server: it learns, trains beside itself, and remembers over a kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import nats
import pytest
from millrace.contracts.codec import decode, encode
from millrace.contracts.observers import RequestFinished
from millrace.contracts.subjects import Subjects
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.lengths.files import MODEL_FILE
from nats.errors import NoRespondersError

from tests.testbed.messages import plain
from tests.testbed.nats_process import NatsProcess
from tests.testbed.programs import Program, start_program
from tests.testbed.waiting import until

#: Longest wait for anything here, seconds.
PATIENCE_S = 60.0
LEARNING = {"pretrained": False, "retrain_outcomes": 250, "outcomes_min": 250, "retrain_pause_s": 0.0}


class Tagger:
    """One tagger process, which may be killed and started again."""

    def __init__(self, folder: Path, url: str, cluster: str) -> None:
        self.kept = folder / "lengths"
        self.log = folder / "tagger.log"
        self._config = folder / "tagger.json"
        learning = LEARNING | {"directory": str(self.kept)}
        self._config.write_text(
            json.dumps({"bus": {"cluster": cluster, "servers": [url]}, "learning": learning, "name": "tagger-0"})
        )
        self.process: Program | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = start_program("services.tagger", ["--config", str(self._config)], output=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


class Asking:
    """Stands in for an ingress: asks for lengths and says what they were."""

    def __init__(self, url: str, cluster: str) -> None:
        self._url, self._subjects = url, Subjects(cluster)
        self._number = 0

    async def __aenter__(self) -> Asking:
        self._nats = await nats.connect(self._url)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._nats.close()

    async def ask(self, prompt: str, **fields: Any) -> LengthTag:
        """The tag of a request; waits for a tagger that is just starting."""
        self._number += 1
        body = TagRequest(
            request=f"i0-{self._number}",
            model="m.1",
            prompt_tokens=12,
            max_tokens=2000,
            prompt=prompt,
            **fields,
        )
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    tag = decode((await self._nats.request(self._subjects.tag("m.1"), encode(body), timeout=10)).data)
                    assert isinstance(tag, LengthTag)
                    return tag
                except NoRespondersError:
                    await asyncio.sleep(0.05)

    async def finish(self, length: int) -> None:
        told = {"model": "m.1", "output_tokens": [length], "finish_reasons": ["stop"]}
        body = plain(RequestFinished, request=f"i0-{self._number}", **told)
        await self._nats.publish(self._subjects.outcome("m.1"), encode(body))

    async def count(self, rng: Random) -> tuple[LengthTag, int]:
        """One request whose numbers decide its length, and its outcome."""
        first, span = rng.randrange(100), rng.randrange(1, 300)
        tag = await self.ask(f"Count from {first} to {first + span}.")
        length = max(1, round(span * rng.lognormvariate(0, 0.1)))
        await self.finish(length)
        return tag, length


@pytest.fixture
def tagger(tmp_path: Path, nats_server: NatsProcess, request: pytest.FixtureRequest) -> Iterator[Tagger]:
    started = Tagger(tmp_path, nats_server.url, request.node.name)
    started.start()
    yield started
    started.kill()
    assert "actor_crashed" not in started.log.read_text()


async def _until_the_model_answers(ingress: Asking, rng: Random) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await ingress.count(rng))[0].source != "model":  # noqa: ASYNC110 each turn asks
            await asyncio.sleep(0.01)


async def test_what_it_learnt_survives_a_kill(
    tagger: Tagger, nats_server: NatsProcess, request: pytest.FixtureRequest
) -> None:
    rng = Random(1)
    async with Asking(nats_server.url, request.node.name) as ingress:
        for _ in range(250):
            await ingress.count(rng)
        await _until_the_model_answers(ingress, rng)
        await until((tagger.kept / "m_1" / MODEL_FILE).exists)
        await until((tagger.kept / "m_1" / "tagger-0.outcomes").exists)
        tagger.kill()
        tagger.start()
        assert (await ingress.ask("Count from 1 to 9.")).source == "model"
