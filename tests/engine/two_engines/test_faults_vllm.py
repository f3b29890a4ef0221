"""The same faults with real vLLM: worker, engine, fork servers killed at 20 streams a second."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.live.faults import expect_identical, expected_outcomes, kill, under_fire, undisturbed
from tests.testbed.up_cluster import UpRig

#: Long enough that several streams are under way on each engine at 20 a second, on a fast machine too.
LENGTH = {"max_tokens": 250, "ignore_eos": True}


def _worker(rig: UpRig) -> int:
    return rig.log_pids("worker-0")[0]


def _engine(rig: UpRig) -> int:
    return rig.log_pids("worker-1")[-1]


def _nats(rig: UpRig) -> int:
    return rig.pids("nats-server")[0]


@pytest.mark.parametrize("victim", [_worker, _engine, _nats], ids=["the worker", "its engine process", "nats-server"])
async def test_killing_it_under_load_costs_no_request_and_no_token(rig: UpRig, victim: Callable[[UpRig], int]) -> None:
    expected = await expected_outcomes(rig, **LENGTH)
    before = await rig.metric("millrace_ingress_continuations_total")
    results = await under_fire(rig, lambda: kill(victim(rig)), seconds=2, shots=1, **LENGTH)
    expect_identical(results, expected)
    if victim is not _nats:  # else nothing was decoded there, and the test would show nothing
        assert await rig.metric("millrace_ingress_continuations_total") > before
    await rig.well(2)


async def test_workers_run_on_and_come_back_without_their_fork_server(rig: UpRig) -> None:
    workers = [_worker(rig), _engine(rig)]
    for pid in rig.pids("millrace: fork server"):
        kill(pid)
    kill(_worker(rig))
    await rig.well(2)
    assert rig.log_pids("worker-1")[-1] == workers[1]
    assert "engines start slower from here on" in rig.output()
    await undisturbed(rig, **LENGTH)


async def test_seeded_sampling_goes_on_with_the_same_noise_after_its_engine_was_killed(rig: UpRig) -> None:
    seeded = LENGTH | {"temperature": 0.8, "seed": 11}
    expected = await expected_outcomes(rig, **seeded)
    assert expected != await undisturbed(rig, **(seeded | {"seed": 12}))
    expect_identical(await under_fire(rig, lambda: kill(_engine(rig)), seconds=2, shots=1, **seeded), expected)
    await rig.well(2)
