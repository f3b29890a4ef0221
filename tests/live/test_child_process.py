"""Slow work in child processes: a cascade is planned from recorded answers, a child that fails says why, and none is
left behind.
"""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from millrace.actor.child_process import NICENESS, run_in_child
from millrace.cascade.jobs import PlannedTier, PlanningJob, plan_in_child
from millrace.enginemodel.parameters import EngineParameters

ROOT = Path(__file__).resolve().parents[2]
RECORDING = next((ROOT / "bench" / "judged" / "recordings").iterdir())


def tier(model: str, *, judged: bool) -> PlannedTier:
    return PlannedTier(
        model=model,
        step_time="h200-llama-3-8b",
        parameters=EngineParameters(blocks_total=2_000),
        instances=1,
        judge=str(ROOT / "models" / model / "judge" / "confidence.json") if judged else "",
    )


class LongJob(msgspec.Struct):
    """Ends after a minute. ``began``: a named pipe that is open as long as the child runs."""

    began: str


def compute_for_long(job: LongJob) -> LongJob:
    with open(job.began, "w") as pipe:
        print("began", file=pipe, flush=True)
        time.sleep(60.0)
    return job


PARENT = """
import asyncio, sys
from millrace.actor.child_process import run_in_child
from tests.live.test_child_process import LongJob, compute_for_long
asyncio.run(run_in_child(compute_for_long, LongJob(sys.argv[1])))
"""


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    began = tmp_path / "began"
    os.mkfifo(began)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(began)], cwd=ROOT)
    try:
        with began.open() as pipe:
            assert pipe.readline() == "began\n"
            parent.kill()
            ended, _, _ = select.select([pipe], [], [], 30.0)
            assert ended, "the child runs on"
            assert pipe.read() == ""
    finally:
        parent.kill()
        parent.wait()


class Standing(msgspec.Struct):
    """Niceness of a process and of its session, and whether the session is its own."""

    process: int = 0
    session: str = ""
    leads: bool = False


def standing_of_child(_: Standing) -> Standing:
    return Standing(os.nice(0), Path("/proc/self/autogroup").read_text().split()[-1], os.getsid(0) == os.getpid())


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not share cores among sessions")
async def test_a_child_is_as_nice_among_sessions_as_it_is_inside_of_one() -> None:
    assert await run_in_child(standing_of_child, Standing()) == Standing(NICENESS, str(NICENESS), leads=True)


async def test_a_cascade_is_planned_in_a_process_of_its_own() -> None:
    tiers = [tier("millrace-nano", judged=True), tier("millrace-mini", judged=False)]
    result = await run_in_child(plan_in_child, PlanningJob(tiers=tiers, sample=str(RECORDING), rate=1.0, quality=40.0))
    assert len(result.chosen.thresholds) == 1
    assert 0 < result.chosen.quality < 100


async def test_a_child_that_fails_says_why() -> None:
    tiers = [tier("millrace-nano", judged=True), tier("millrace-mini", judged=False)]
    with pytest.raises(ChildProcessError, match=r"nowhere\.jsonl"):
        await run_in_child(plan_in_child, PlanningJob(tiers=tiers, sample="nowhere.jsonl", rate=1.0, quality=40.0))
