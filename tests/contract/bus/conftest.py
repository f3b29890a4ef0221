"""Every test here runs on both buses, and between actors that share a live process."""

from collections.abc import AsyncIterator

import pytest

from tests.contract.bus.harness import Harness, NatsHarness, SimHarness


@pytest.fixture(params=["sim", "nats", "local"])
async def bus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A fresh bus with nobody on it."""
    harness = harness_of(request.param, tmp_path_factory)
    yield harness
    await harness.close()


@pytest.fixture(params=["sim", "nats"])
async def wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """The same for what holds of messages that leave the process only: size limits, and a bus that is away."""
    harness = harness_of(request.param, tmp_path_factory)
    yield harness
    await harness.close()


def harness_of(kind: str, folders: pytest.TempPathFactory) -> Harness:
    """A fresh bus of this kind."""
    if kind == "sim":
        return SimHarness(seed=11)
    return NatsHarness(folders.mktemp("nats"), local=kind == "local")
