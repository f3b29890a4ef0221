"""The fixture that keeps this folder pure (conftest.py) really refuses."""

import asyncio
import socket
import time

import pytest

REFUSED = pytest.fail.Exception


def test_a_connection_is_refused():
    with socket.socket() as client, pytest.raises(REFUSED, match=r"socket\.connect"):
        client.connect(("127.0.0.1", 9))


def test_a_listener_is_refused():
    with socket.socket() as server, pytest.raises(REFUSED, match=r"socket\.bind"):
        server.bind(("127.0.0.1", 0))


@pytest.mark.parametrize("clock", ["time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"])
def test_the_wall_clock_is_refused(clock: str):
    with pytest.raises(REFUSED, match=clock):
        getattr(time, clock)()


def test_a_sleep_is_refused():
    with pytest.raises(REFUSED, match=r"time\.sleep"):
        time.sleep(0)


async def test_an_asyncio_sleep_is_refused_but_a_yield_is_not():
    await asyncio.sleep(0)
    with pytest.raises(REFUSED, match=r"asyncio\.sleep"):
        await asyncio.sleep(0.001)
