"""The share of time in which device memory is busy: read once a second, and given up where it cannot be read."""

from __future__ import annotations

import pytest
from millrace.actor.engine import EngineSnapshot

from services.worker.indicators import load_indicators
from services.worker.vllm_engine.device_memory import MemoryBusy
from tests.testbed.messages import plain

S = 1_000_000_000


def snapshot(at_ns: int) -> EngineSnapshot:
    return plain(EngineSnapshot, at_ns=at_ns)


def test_the_mean_of_an_engines_devices_is_read_once_a_second_and_reaches_the_indicators() -> None:
    shares = iter([(0.5, 0.7), (1.0, 0.0)])
    busy = MemoryBusy(lambda: next(shares))
    told = [busy.noted(snapshot(at_ns)).memory_busy for at_ns in (5 * S, 5 * S + 1, 6 * S)]
    assert told == [0.6, 0.6, 0.5]
    noted = MemoryBusy(lambda: (0.25,)).noted(snapshot(S))
    assert load_indicators(noted, [], now_ns=S, block_size=16, moves=(0, 0)).memory_busy == 0.25


def test_without_a_device_nothing_is_measured() -> None:
    assert MemoryBusy(None).noted(snapshot(S)).memory_busy is None


def test_a_device_that_cannot_be_read_is_given_up_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> list[float]:
        raise OSError("GPU is lost")

    busy = MemoryBusy(fails)
    assert [busy.noted(snapshot(at_s * S)).memory_busy for at_s in (1, 2, 3)] == [None, None, None]
    assert caplog.text.count("GPU is lost") == 1
