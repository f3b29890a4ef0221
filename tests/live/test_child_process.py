"""Slow work in child processes: a cascade is planned from recorded answers, and a child that fails says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from millrace.actor.child_process import run_in_child
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


async def test_a_cascade_is_planned_in_a_process_of_its_own() -> None:
    tiers = [tier("millrace-nano", judged=True), tier("millrace-mini", judged=False)]
    result = await run_in_child(plan_in_child, PlanningJob(tiers=tiers, sample=str(RECORDING), rate=1.0, quality=40.0))
    assert result.chosen is not None
    assert len(result.chosen.thresholds) == 1
    assert 0 < result.chosen.quality < 100


async def test_a_child_that_fails_says_why() -> None:
    tiers = [tier("millrace-nano", judged=True), tier("millrace-mini", judged=False)]
    with pytest.raises(ChildProcessError, match=r"nowhere\.jsonl"):
        await run_in_child(plan_in_child, PlanningJob(tiers=tiers, sample="nowhere.jsonl", rate=1.0, quality=40.0))
