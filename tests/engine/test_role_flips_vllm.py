"""Roles flip on two real engines under load: no request fails, and no token differs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.role_flips import ORDERS, measure, options_of
from tests.testbed.tiny_llama import build
from tests.testbed.up_cluster import UpRig

STREAMS = 4
#: Once through all orders. More by MILLRACE_ROLE_FLIPS, or by `python -m bench role_flips`.
FLIPS = int(os.environ.get("MILLRACE_ROLE_FLIPS", str(len(ORDERS))))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder = tmp_path_factory.mktemp("up")
    model: Path = build(folder / "model", layers=2)
    options = [*options_of("vllm"), "--set", "worker.enforce_eager=true"]
    with UpRig(folder / "c", model_path=model, engine="vllm", instances=2, extra=options) as cluster:
        yield cluster


async def test_flips_under_load_cost_no_request_and_no_token(rig: UpRig) -> None:
    row = await measure(rig, flips=FLIPS, limit_s=240, streams=STREAMS, tokens=200, seed=1)
    assert row.flips == FLIPS
    assert (row.failed, row.differing, row.blocks_left) == (0, 0, 0), row
    assert row.streams >= STREAMS, "so many run at all times"
    assert row.moved >= FLIPS // 2, row
