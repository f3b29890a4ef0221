"""A clock that is set: processes that start after it work with those that run, and no request notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.ingress_rig import write_model_folder
from tests.testbed import programs
from tests.testbed.timed_streams import TimedStream, client
from tests.testbed.up_cluster import UpRig, prompt_text, stream

#: What every Python of the cluster runs first: its wall clock is the system's and so many seconds.
SHIM = """
import os, time
from pathlib import Path
now_ns, file = time.time_ns, Path(os.environ["STEP_FILE"])
time.time_ns = lambda: now_ns() + int(file.read_text()) * 10**9
time.time = lambda: time.time_ns() / 1e9
"""

HOUR_S = 3600

TOKENS = 60


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the seconds that the cluster's wall clock is ahead of the system's from now on."""
    (tmp_path / "sitecustomize.py").write_text(SHIM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("STEP_FILE", str(tmp_path / "step"))
    monkeypatch.setattr(programs, "_servers", [])  # a process that was forked has read no such file
    step = tmp_path / "step"
    step.write_text("0")
    return step


@pytest.fixture
def rig(clock: Path, tmp_path: Path) -> Iterator[UpRig]:
    model = write_model_folder(tmp_path / "model")
    with UpRig(
        tmp_path / "c", model_path=model, engine="modelled", instances=2, extra=("--processes", "2", "--ingresses", "2")
    ) as made:
        yield made


async def streams(rig: UpRig, count: int) -> list[TimedStream]:
    async with client(120) as http:
        asked = (stream(http, rig, prompt_text(n), max_tokens=TOKENS, ignore_eos=True) for n in range(count))
        return list(await asyncio.gather(*asked))


async def test_after_a_step_every_process_may_be_killed_and_no_stream_ends(rig: UpRig, clock: Path) -> None:
    for step_s in (-HOUR_S, HOUR_S):
        await asyncio.to_thread(clock.write_text, str(step_s))
        for what in ("worker-0", "worker-1", "coordinator-0", "migrator-0"):
            asked = asyncio.create_task(streams(rig, 4))
            await asyncio.sleep(0.3)
            os.kill(rig.log_pids(what)[0], signal.SIGKILL)
            assert [(each.tokens, each.error) for each in await asked] == [(TOKENS, "")] * 4, (step_s, what)
            await rig.well(2, limit_s=60)
        assert [(each.tokens, each.error) for each in await streams(rig, 8)] == [(TOKENS, "")] * 8, step_s
        assert "alive" in rig.cli("status")
