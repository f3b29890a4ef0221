"""Every test here runs on both buses."""

from collections.abc import AsyncIterator

import pytest

from tests.contract.bus.harness import Harness, NatsHarness, SimHarness


@pytest.fixture(params=["sim", "nats"])
async def bus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A fresh bus with nobody on it."""
    harness: Harness = SimHarness(seed=11) if request.param == "sim" else NatsHarness(tmp_path_factory.mktemp("nats"))
    yield harness
    await harness.close()
