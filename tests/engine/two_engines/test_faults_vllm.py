"""The same faults with real vLLM: worker and engine killed at 20 streams a second."""

from typing import Any

import pytest

from tests.live.faults import expect_identical, expected_outcomes, kill, under_fire
from tests.testbed.programs import ended
from tests.testbed.up_cluster import UpRig

#: Long enough that several streams are under way on each engine at 20 a second, on a fast machine too.
LENGTH = {"max_tokens": 250, "ignore_eos": True}


@pytest.mark.parametrize(
    ("worker", "process", "drawn"),
    [("worker-0", 0, {}), ("worker-1", -1, {"temperature": 0.8, "seed": 11})],
    ids=["the worker", "its engine process"],
)
async def test_killing_it_under_load_costs_no_request_and_no_token(
    rig: UpRig, worker: str, process: int, drawn: dict[str, Any]
) -> None:
    """A seeded stream draws the same noise on another engine."""
    length = LENGTH | drawn
    expected = await expected_outcomes(rig, **length)
    before = await rig.metric("millrace_ingress_continuations_total")
    pids = rig.log_pids(worker)
    results = await under_fire(rig, lambda: kill(pids[process]), seconds=2, shots=1, **length)
    expect_identical(results, expected)
    assert await rig.metric("millrace_ingress_continuations_total") > before
    await rig.well(2)
    assert all(map(ended, pids)), "neither stays without the other"
