"""The same faults with real vLLM: worker, engine, nats-server killed at 20 streams a second."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.live.faults import expect_identical, expected_outcomes, kill, under_fire
from tests.testbed.up_cluster import UpRig

#: Long enough that several streams are under way on each engine at 20 a second, on a fast machine too.
LENGTH = {"max_tokens": 250, "ignore_eos": True}


def _worker(rig: UpRig) -> int:
    return rig.log_pids("worker-0")[0]


def _engine(rig: UpRig) -> int:
    return rig.log_pids("worker-1")[-1]


def _nats(rig: UpRig) -> int:
    return rig.pids("nats-server")[0]


@pytest.mark.parametrize(
    ("victim", "drawn"),
    [(_worker, {}), (_engine, {"temperature": 0.8, "seed": 11}), (_nats, {})],
    ids=["the worker", "its engine process", "nats-server"],
)
async def test_killing_it_under_load_costs_no_request_and_no_token(
    rig: UpRig, victim: Callable[[UpRig], int], drawn: dict[str, Any]
) -> None:
    """A seeded stream draws the same noise on another engine."""
    length = LENGTH | drawn
    expected = await expected_outcomes(rig, **length)
    before = await rig.metric("millrace_ingress_continuations_total")
    results = await under_fire(rig, lambda: kill(victim(rig)), seconds=2, shots=1, **length)
    expect_identical(results, expected)
    if victim is not _nats:  # else nothing was decoded there, and the test would show nothing
        assert await rig.metric("millrace_ingress_continuations_total") > before
    await rig.well(2)
