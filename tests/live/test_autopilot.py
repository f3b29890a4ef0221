"""The autopilot on a live cluster: it replays the load and says what comes of it, until the cluster changes."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from millrace.cli.cluster_view import ClusterView

from tests.testbed.up_cluster import UpRig

ROOT = Path(__file__).resolve().parents[2]

#: Round robin puts a request behind long ones while another instance is free; whether a window of 20 s shows that in
#: every figure is for chance.
SETTINGS = ("policies.dispatch.name=round_robin", "worker.max_num_seqs=2", "coordinator.autopilot_interval_s=15")
RATE, SECONDS = 14, 20


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[UpRig]:
    words = [word for each in SETTINGS for word in ("--set", each)]
    model = ROOT / "models" / "millrace-mini"
    with UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=3, extra=words) as rig:
        yield rig


def load(rig: UpRig, seconds: int) -> None:
    words = ("--url", rig.url, "--model", rig.model, "--rate", f"{RATE}", "--seconds", f"{seconds}")
    command = [sys.executable, str(ROOT / "examples" / "load.py"), *words]
    subprocess.run(command, check=True, timeout=120)


def says(text: str) -> Callable[[ClusterView], bool]:
    return lambda view: any(text in advice.evidence for advice in view.advice())


async def hurry(rig: UpRig) -> None:
    """Gives replays their turn: they give way to all else that a machine does, which on a full one is for ever."""
    coordinator = psutil.Process(rig.pids("coordinator-0.json")[0])
    while True:
        for child in coordinator.children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                os.sched_setscheduler(child.pid, os.SCHED_OTHER, os.sched_param(0))
                child.nice(0)
        await asyncio.sleep(0.5)


async def test_a_load_is_replayed_and_what_that_says_is_forgotten_when_the_cluster_changes(rig: UpRig) -> None:
    await rig.until_seen(says("waits for 200 requests"))
    load(rig, SECONDS)
    hurrying = asyncio.create_task(hurry(rig))
    await rig.until_seen(says("better in"), limit_s=500)
    hurrying.cancel()
    better = "policies.dispatch.name=forecast was better in the last window; the next one decides"
    nothing = "none of 3 other settings is better in all that counts"
    for words in (("status",), ("explain", "m")):
        told = " ".join(rig.cli(*words).split())
        assert f"autopilot: {better}" in told or f"autopilot: {nothing}" in told
    assert "the cluster is as the file says" in rig.cli("apply", "--set", "policies.dispatch.name=forecast")
    load(rig, 1)
    await rig.until_seen(says("waits for 200 requests"))
