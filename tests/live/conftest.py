"""One real nats-server for all live tests, and ingress's HTTP side over a core that answers by itself.

A test that kills the server makes its own NatsProcess; tests of whole clusters have a ``rig`` of their own.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.live.ingress_rig import Rig, served
from tests.testbed.nats_process import NatsProcess
from tests.testbed.programs import open_fork_server

open_fork_server()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsProcess]:
    """A running server; ``.url`` says where. Tests share it: each uses a cluster name of its own."""
    server = NatsProcess(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with served(tmp_path) as rig:
        yield rig
        assert rig.bugs == []


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=rig.url) as client:
        yield client
