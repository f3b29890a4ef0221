"""Every test here runs on both buses, and between actors that share a live process."""

from collections.abc import AsyncIterator

import pytest

from tests.contract.bus.harness import Harness, NatsHarness, SimHarness


@pytest.fixture(params=["sim", "nats", "local"])
async def bus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A fresh bus with nobody on it."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    harness = SimHarness(seed=11) if kind == "sim" else NatsHarness(folder, local=kind == "local")
    yield harness
    await harness.close()
