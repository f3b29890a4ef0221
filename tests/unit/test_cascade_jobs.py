"""Planning of a live cascade: from recorded answers, present instances and a rate to thresholds."""

import json
from pathlib import Path
from random import Random

import msgspec
import pytest
from millrace.cascade.jobs import FRONT_MOST, PlannedTier, PlanningJob, plan_job
from millrace.cascade.recorded import recorded_sample
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.evidence import ConfidenceFeature
from millrace.judging.files import JudgeUnreadable, write_judge

STEP_TIMES: dict[str, StepTimeModel] = {name: load_step_time(name) for name in ("cpu-500k", "cpu-8m")}
PARAMETERS = EngineParameters(max_model_len=4096, prefix_caching=False)
JUDGE = ConfidenceModel(
    model="small", feature=ConfidenceFeature.SUM, curve=IsotonicCurve((-4.0, 0.0), (0.0, 1.0)), answers=100,
    area=0.9, error=0.02,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording in which the small model is right as often as its judge says, the large one nearly always."""
    rng, lines = Random(3), []
    for index in range(500):
        chance = rng.random()
        small = {"right": rng.random() < chance, "logprobs": [-round(4000 * (1 - chance))], "output_tokens": 20}
        large = {"right": rng.random() < 0.95, "logprobs": [-10] * 30}
        answers = {"small": small, "large": large} | ({"other": large} if index % 2 else {})
        lines.append(json.dumps({"prompt": f"q{index}", "prompt_tokens": 40, "answers": answers}))
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    write_judge(tmp_path / "small.json", JUDGE)
    return tmp_path


def _job(folder: Path, *, small: int = 1, large: int = 1, **fields: object) -> PlanningJob:
    tiers = [
        PlannedTier(
            model="small",
            step_time="cpu-500k",
            parameters=PARAMETERS,
            instances=small,
            judge=str(folder / "small.json"),
        ),
        PlannedTier(model="large", step_time="cpu-8m", parameters=PARAMETERS, instances=large),
    ]
    given = {"rate": 2.0, "quality": 80.0} | fields
    return PlanningJob(tiers=tiers, sample=str(folder / "answers.jsonl"), **given)  # type: ignore[arg-type]


def test_a_sample_has_scores_of_the_judge_and_the_recorded_truth(folder: Path) -> None:
    sample = recorded_sample(folder / "answers.jsonl", ["small", "large"], [JUDGE])
    assert (sample.count, sample.tiers) == (500, 2)
    assert set(sample.quality.ravel().tolist()) == {0.0, 100.0}
    assert sample.output_tokens[0].tolist() == [20, 30]
    assert sample.prompt_tokens[0].tolist() == [40, 40]
    assert 45 < sample.scores.mean() < 55


def test_requests_that_a_tier_did_not_answer_are_left_out(folder: Path) -> None:
    assert recorded_sample(folder / "answers.jsonl", ["small", "other"], [JUDGE]).count == 250
    with pytest.raises(ValueError, match="no request that small, nobody all answered"):
        recorded_sample(folder / "answers.jsonl", ["small", "nobody"], [JUDGE])


def test_a_quality_that_no_plan_reaches_gives_the_best_one_flagged(folder: Path) -> None:
    result = plan_job(_job(folder, quality=99.0), STEP_TIMES)
    assert not result.meets
    assert "no routing keeps quality 99" in result.reason
    assert result.chosen.quality > 90
    assert all(value <= 100 for value in result.chosen.thresholds)


def test_thresholds_that_keep_the_quality_asked_for_are_kept_while_they_fit(folder: Path) -> None:
    result = plan_job(_job(folder), STEP_TIMES)
    first = result.chosen
    assert result.meets
    assert first.quality_low >= 80.0
    again = _job(folder, thresholds=first.thresholds, planned_p95_s=first.p95_s)
    assert plan_job(again, STEP_TIMES).keep
    low = msgspec.structs.replace(again, thresholds=[1.0])
    assert not plan_job(low, STEP_TIMES).keep
    crowded = msgspec.structs.replace(again, rate=200.0)
    assert "planned 0.2 s" in plan_job(crowded, STEP_TIMES).reason


def test_the_best_division_of_as_many_instances_is_told(folder: Path) -> None:
    job = _job(folder, small=5, large=1, rate=30.0, quality=88.0)
    assert plan_job(job, STEP_TIMES).best is None, "only where it is asked for"
    best = plan_job(job, STEP_TIMES, front=True).best
    assert sum(best.instances) <= 6
    assert best.instances[1] > 1


@pytest.mark.parametrize("divided", [False, True])
def test_the_front_rises_in_quality_and_latency(folder: Path, divided: bool) -> None:
    front = plan_job(_job(folder), STEP_TIMES, front=divided).front
    assert FRONT_MOST >= len(front) > 2
    assert divided or {tuple(each.instances) for each in front} == {(1, 1)}
    assert [each.p95_s for each in front] == sorted(each.p95_s for each in front)
    qualities = [each.quality for each in front]
    assert qualities == sorted(set(qualities)), "a design that a faster one beats is not of the front"


@pytest.mark.parametrize("field", ["judge", "step_time"])
def test_what_is_missing_or_torn_is_named(field: str, folder: Path) -> None:
    job = _job(folder)
    tiers = [msgspec.structs.replace(job.tiers[0], **{field: ""}), job.tiers[1]]
    with pytest.raises(ValueError, match="small"):
        plan_job(msgspec.structs.replace(job, tiers=tiers), STEP_TIMES)
    with pytest.raises(OSError, match="missing"):
        plan_job(msgspec.structs.replace(job, sample="missing.jsonl"), STEP_TIMES)
    (folder / "small.json").write_text("{")
    with pytest.raises(JudgeUnreadable, match=r"small\.json"):
        plan_job(job, STEP_TIMES)
