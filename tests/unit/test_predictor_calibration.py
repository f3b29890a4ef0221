"""Step times against what engines really took: a scale on a known set, and a fit where none is known."""

import random

import msgspec
import pytest
from millrace.contracts.predictor import LatencyPrediction, NoPrediction, NoPredictionReason
from millrace.contracts.status import BatchComposition, StatusSnapshot
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_time_models import LinearStepTime

from services.predictor.calibration import (
    FIT_STEPS_MIN,
    OUTLIER_RATIO,
    SCALE_MAX,
    SCALE_MIN,
    Calibration,
    Kin,
    StepScale,
    run_of_decodes,
)
from tests.unit.predictor_rig import MS, START_NS, STEP_MS, Predictor, record, served, snapshot, status

TRUTH = LinearStepTime(fixed=3e6, per_decode=7e4, per_prefill_token=6e4, per_context_token=500.0, per_prefill_work=60.0)
PARAMETERS = EngineParameters()


def decoding(step: int, at_ns: int, sequences: int = 2, duration_ns: int = STEP_MS * MS) -> StatusSnapshot:
    """A snapshot after decode step ``step`` of sequences that began to decode with step 1."""
    running = [status(f"r{index}.0", output_tokens=step) for index in range(sequences)]
    batch = BatchComposition(decodes=sequences, context_tokens=sequences * (32 + step))
    return snapshot(step=step, at_ns=at_ns, running=running, blocks_free=400, step_duration_ns=duration_ns, batch=batch)


def steps(rng: random.Random, count: int, *, prefills: bool = True) -> list[tuple[BatchComposition, int]]:
    """Steps of an engine that follows TRUTH to within three percent."""
    found = []
    for _ in range(count):
        decodes, prompt = rng.randrange(1, 30), rng.randrange(10, 400) if prefills and rng.random() < 0.2 else 0
        batch = BatchComposition(
            decodes=decodes,
            prefills=int(prompt > 0),
            prefill_tokens=prompt,
            context_tokens=decodes * rng.randrange(50, 900) + prompt,
            prefill_work=prompt * prompt / 2,
            prefill_context_tokens=prompt,
        )
        found.append((batch, round(TRUTH.duration_ns(batch) * rng.gauss(1.0, 0.03))))
    return found


def learnt(seen: list[tuple[BatchComposition, int]]) -> Calibration:
    calibration = Calibration(Kin(None, PARAMETERS))
    for number, (batch, duration_ns) in enumerate(seen, start=1):
        calibration.observe(snapshot(step=number, batch=batch, step_duration_ns=duration_ns), None)
    return calibration


# the scale


def test_one_slow_step_moves_the_scale_little() -> None:
    scale = StepScale()
    for _ in range(100):
        scale.observe(10.0, 10.0)
    scale.observe(10_000.0, 10.0)
    assert 1.0 < scale.value < 1 + OUTLIER_RATIO / 60


@pytest.mark.parametrize(("measured", "bound"), [(1.0, SCALE_MIN), (1e6, SCALE_MAX)])
def test_a_scale_keeps_within_its_bounds(measured: float, bound: float) -> None:
    scale = StepScale()
    for _ in range(2_000):
        scale.observe(measured, 1_000.0)
    assert scale.value == bound


@pytest.mark.parametrize("measured", [0.0, -5.0])
def test_a_step_without_duration_says_nothing(measured: float) -> None:
    scale = StepScale()
    scale.observe(measured, 10.0)
    assert (scale.value, scale.steps) == (1.0, 0)


# runs of decode steps


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (decoding(3, START_NS, 2), decoding(10, START_NS, 3)),
        (decoding(3, START_NS, 0), decoding(10, START_NS, 0)),
        (decoding(3, START_NS), decoding(3, START_NS)),
        (decoding(0, START_NS), decoding(900, START_NS)),
        (None, decoding(10, START_NS)),
    ],
    ids=["another joined", "nobody is there", "no step", "too far apart", "nothing before"],
)
def test_anything_else_is_no_run(first: StatusSnapshot | None, later: StatusSnapshot) -> None:
    assert run_of_decodes(first, later) == 0


def test_pauses_between_steps_count_in_a_run() -> None:
    predictor = served(decoding(1, START_NS))
    for number in range(1, 200):
        predictor.now_ns = START_NS + number * 5 * (STEP_MS + 2) * MS
        predictor.send(decoding(1 + 5 * number, predictor.now_ns))
    (scale,) = [scale for _, scale, *_ in predictor.metrics.instances()]
    assert scale == pytest.approx((STEP_MS + 2) / STEP_MS, rel=0.02)


# the fit


def test_a_fit_finds_what_the_steps_follow() -> None:
    rng = random.Random(1)
    calibration = learnt(steps(rng, 400))
    for batch, duration_ns in steps(rng, 50):
        predicted_ns = calibration.kin.cost.duration_fs(batch) * calibration.scale(START_NS) / 1e6
        assert predicted_ns == pytest.approx(duration_ns, rel=0.15)


def test_a_fit_waits_for_prompts_however_many_decodes_it_saw() -> None:
    calibration = learnt(steps(random.Random(3), 5 * FIT_STEPS_MIN, prefills=False))
    assert calibration.kin.cost is None


def test_steps_that_a_stopped_process_made_long_do_not_spoil_a_fit() -> None:
    rng = random.Random(4)
    seen = [
        (batch, duration_ns * (50 if index % 20 == 0 else 1))
        for index, (batch, duration_ns) in enumerate(steps(rng, 200))
    ]
    calibration = learnt(seen)
    for batch, duration_ns in steps(rng, 30):
        assert calibration.kin.cost.duration_fs(batch) / 1e6 == pytest.approx(duration_ns, rel=0.25)


def test_a_fit_finds_what_any_prompt_costs_besides_its_tokens() -> None:
    truth = msgspec.structs.replace(TRUTH, per_prompted_step=4e6)
    calibration = learnt([(batch, truth.duration_ns(batch)) for batch, _ in steps(random.Random(6), 400)])
    short = BatchComposition(decodes=1, prefills=1, prefill_tokens=2, context_tokens=42, prefill_work=2.0)
    assert calibration.kin.cost.duration_fs(short) / 1e6 == pytest.approx(truth.duration_ns(short), rel=0.02)


# in the actor


def told(predictor: Predictor, seen: list[tuple[BatchComposition, int]]) -> None:
    for number, (batch, duration_ns) in enumerate(seen, start=1):
        at_ns = START_NS + number * 20 * MS
        predictor.now_ns = at_ns
        predictor.send(snapshot(step=number, at_ns=at_ns, batch=batch, step_duration_ns=duration_ns))


def test_calibration_can_be_switched_off() -> None:
    predictor = served(calibrate=False)
    told(predictor, [(BatchComposition(decodes=1, context_tokens=40), 2 * STEP_MS * MS)] * 100)
    assert predictor.ask().e2e_ns == 10 * STEP_MS * MS


def test_an_instance_without_a_set_answers_once_enough_steps_were_seen() -> None:
    predictor = Predictor(step_times={})
    predictor.register(record(step_time=""))
    seen = steps(random.Random(5), 200)
    told(predictor, seen[: FIT_STEPS_MIN - 1])
    answer = predictor.ask()
    assert isinstance(answer, NoPrediction)
    assert answer.reason is NoPredictionReason.NO_STEP_TIME
    told(predictor, seen)
    prompt = TRUTH.duration_ns(BatchComposition(prefills=1, prefill_tokens=32, context_tokens=32, prefill_work=512.0))
    decode = TRUTH.duration_ns(BatchComposition(decodes=1, context_tokens=37))
    assert predictor.ask().e2e_ns == pytest.approx(prompt + 9 * decode, rel=0.1)


def test_a_restarted_engine_of_the_same_kind_keeps_what_was_learnt() -> None:
    predictor = Predictor(step_times={})
    predictor.register(record(step_time=""))
    told(predictor, steps(random.Random(6), 120))
    predictor.register(record(step_time="", incarnation=6))
    predictor.send(snapshot(incarnation=6, at_ns=predictor.now_ns))
    assert isinstance(predictor.ask(), LatencyPrediction)


def test_an_instance_that_has_shown_nothing_is_judged_by_its_kin() -> None:
    predictor = served()
    predictor.register(record("w1", blocks_total=500), key="w1")
    predictor.register(record("w2", token_budget=512), key="w2")
    told(predictor, [(BatchComposition(decodes=1, context_tokens=40), 2 * STEP_MS * MS)] * 600)
    scales = {name: scale for name, scale, *_ in predictor.metrics.instances()}
    assert scales["w0"] == pytest.approx(2.0, rel=0.02)
    assert scales["w1"] == pytest.approx(2.0, rel=0.02)
    assert scales["w2"] == 1.0


def test_a_snapshot_told_again_is_not_learnt_from_twice() -> None:
    predictor = served()
    batch = BatchComposition(decodes=1, context_tokens=40)
    for _ in range(500):
        predictor.send(snapshot(step=2, batch=batch, step_duration_ns=4 * STEP_MS * MS))
    (scale,) = [scale for _, scale, *_ in predictor.metrics.instances()]
    assert scale < 1.6
