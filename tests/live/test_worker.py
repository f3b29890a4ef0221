"""A worker process with three modelled engines on a real nats-server, and its end."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from millrace.contracts.status import PresenceState
from millrace.contracts.worker import Sampling

from tests.testbed.nats_process import NatsProcess
from tests.testbed.worker_rig import FakeIngress, create_buckets, start_worker, write_config

PROMPT = list(range(1, 40))


class Workers:
    """A server of its own (tests kill it) and one worker process with three instances."""

    def __init__(self, folder: Path, cluster: str) -> None:
        self.cluster = cluster
        self.nats = NatsProcess(folder)
        self.nats.start()
        asyncio.run(create_buckets(self.nats.url, cluster))
        config = write_config(
            folder,
            "w",
            self.nats.url,
            cluster,
            engine="modelled",
            instances=3,
            limits={"drain_limit_ms": 300, "linger_ms": 100},
        )
        self.process = start_worker(config)
        self.log = config.with_suffix(".log")

    def ingress(self) -> FakeIngress:
        return FakeIngress(self.nats.url, self.cluster)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)
        self.nats.close()


@pytest.fixture
def workers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Workers]:
    workers = Workers(tmp_path, "live")
    yield workers
    workers.close()
    assert "actor_crashed" not in workers.log.read_text()


async def test_sigterm_hands_back_what_is_left_and_unregisters(workers: Workers) -> None:
    async with workers.ingress() as ingress:
        await ingress.up("w-0", "w-1", "w-2")
        await ingress.submit("w-0", "r.0", PROMPT, Sampling(max_tokens=6000, ignore_eos=True))
        workers.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(workers.process.wait, 10) == 0
        await ingress.until(lambda: bool(ingress.returned))
        assert ingress.returned[0].sequences == [("r.0", 0)]
        assert ingress.presences["w-0"].state is PresenceState.LEAVING
        assert await ingress.registered() == set()
