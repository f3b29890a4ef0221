"""One real nats-server for all live tests; a test that kills it makes its own NatsProcess."""

from collections.abc import Iterator

import pytest

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
