"""Confidence judges: their features, calibration and bound of a running answer; their files, trained and shipped."""

import gzip
import json
import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.cli.__main__ import main
from millrace.judging.calibration import IsotonicCurve, area_under_curve, calibration_error, fit_isotonic
from millrace.judging.confidence import fit_confidence
from millrace.judging.evidence import ConfidenceFeature, RunningEvidence, feature_of
from millrace.judging.files import CONFIDENCE_FILE, JudgedAnswer, JudgeUnreadable, read_judge
from millrace.judging.training import train_judge


def test_features_of_an_answer() -> None:
    logprobs = [-0.1] * 18 + [-2.0, -4.0]
    assert feature_of(ConfidenceFeature.SUM, logprobs) == pytest.approx(-7.8)
    assert feature_of(ConfidenceFeature.LEAST, logprobs) == -4.0
    assert feature_of(ConfidenceFeature.LOW_MEAN, logprobs) == pytest.approx(-3.0)
    assert feature_of(ConfidenceFeature.MEAN, logprobs) == pytest.approx(-0.39)


@pytest.mark.parametrize("logprobs", [[], [math.nan], [-1.0, 0.5], [math.inf]])
def test_what_is_no_log_probability_is_no_evidence(logprobs: list[float]) -> None:
    assert feature_of(ConfidenceFeature.SUM, logprobs) is None


@given(st.lists(st.floats(-40, 0) | st.just(-math.inf), min_size=1, max_size=40), st.integers(0, 40))
def test_a_running_value_bounds_the_final_one(logprobs: list[float], cut: int) -> None:
    running = RunningEvidence()
    running.add(logprobs[:cut])
    for feature in (ConfidenceFeature.SUM, ConfidenceFeature.LEAST):
        bound, final = running.value(feature), feature_of(feature, logprobs)
        assert bound >= final - 1e-9
        assert cut < len(logprobs) or bound == pytest.approx(final)
    assert running.value(ConfidenceFeature.MEAN) is None


def test_isotonic_calibration_is_the_least_squares_rising_curve() -> None:
    curve = fit_isotonic(np.array([1.0, 2.0, 3.0, 4.0]), np.array([False, True, False, True]))
    assert curve.at(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx([0.0, 0.5, 0.5, 1.0])


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=60))
def test_calibration_rises_and_keeps_the_share_of_right_answers(pairs: list[tuple[int, bool]]) -> None:
    scores = np.array([float(score) for score, _ in pairs])
    right = np.array([each for _, each in pairs])
    fitted = fit_isotonic(scores, right).at(np.sort(scores))
    assert (np.diff(fitted) >= -1e-12).all()
    assert fitted.mean() == pytest.approx(right.mean())


def test_the_area_under_the_curve_counts_pairs() -> None:
    rng = Random(1)
    scores = np.array([rng.randint(0, 5) for _ in range(40)], dtype=float)
    right = np.array([rng.random() < 0.5 for _ in range(40)])
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[right] for b in scores[~right]]
    assert area_under_curve(scores, right) == pytest.approx(float(np.mean(pairs)))
    assert area_under_curve(scores, np.ones(40, dtype=bool)) == 0.5


def answers(seed: int, count: int = 400) -> tuple[list[list[float]], np.ndarray]:
    """Answers whose tokens are each right with their probability; an answer is right if all of them are."""
    rng = Random(seed)
    told, right = [], []
    for _ in range(count):
        probabilities = [rng.uniform(0.6, 1.0) for _ in range(rng.randint(1, 12))]
        told.append([math.log(each) for each in probabilities])
        right.append(all(rng.random() < each for each in probabilities))
    return told, np.array(right)


def test_the_sum_wins_where_an_answer_is_right_if_all_tokens_are() -> None:
    told, right = answers(1, 2000)
    model = fit_confidence("m", told, right)
    assert model.feature is ConfidenceFeature.SUM
    assert model.area > 0.75
    assert model.error < 0.05
    fresh, truth = answers(2, 2000)
    scores = np.array([model.score(each) for each in fresh])
    assert calibration_error(scores / 100, truth) < 0.06


def test_an_answer_below_the_least_value_of_a_score_does_not_reach_it() -> None:
    told, right = answers(3)
    model = fit_confidence("m", told, right)
    running = RunningEvidence()
    running.add(told[0])
    value, score = running.value(model.feature), model.score(told[0])
    for wanted in (score - 1.0, score + 1.0):
        least = model.least_value(wanted)
        assert (value >= least) == (wanted < score)


def test_no_judge_is_fitted_to_few_answers_or_to_answers_of_one_kind() -> None:
    told, right = answers(4)
    with pytest.raises(ValueError, match="needs 50 answers"):
        fit_confidence("m", told[:40], right[:40])
    with pytest.raises(ValueError, match="right and wrong"):
        fit_confidence("m", told, np.ones(len(told), dtype=bool))
    with pytest.raises(ValueError, match="no usable log-probabilities"):
        fit_confidence("m", [*told, [math.nan]], np.append(right, True))


@pytest.mark.parametrize(
    ("scores", "probabilities"),
    [((), ()), ((1.0, 1.0), (0.1, 0.2)), ((1.0, 2.0), (0.5, 0.4)), ((1.0,), (1.5,)), ((1.0, 2.0), (0.5,))],
)
def test_a_malformed_curve_is_refused(scores: tuple[float, ...], probabilities: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="isotonic curve"):
        IsotonicCurve(scores, probabilities)


# Files: written by ``millrace train judge``, read, refused for other weights; the shipped ones.


ROOT = Path(__file__).parents[2]


def _recording(path: Path, *, count: int = 600, seed: int = 1, telling: bool = True) -> Path:
    """Answers whose least token decides, by a logistic curve, whether they are right."""
    rng, lines = Random(seed), []
    for index in range(count):
        logprobs = [-round(1000 * rng.expovariate(4)) for _ in range(8)]
        chance = 1 / (1 + math.exp(-(3 + sum(logprobs) / 500))) if telling else 0.5
        answer = {"right": rng.random() < chance, "logprobs": logprobs, "output_tokens": 8}
        lines.append(json.dumps({"task": "t", "prompt": f"question {index}", "answers": {"m": answer}}))
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write("\n".join(lines))
    return path


def _model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def _train(tmp_path: Path, recording: Path, *more: str) -> int:
    return main(["train", "judge", "--from", str(recording), "--model-path", str(tmp_path / "m"), *more])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_recorded_answers_become_the_judge_of_their_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _model(tmp_path / "m")
    assert _train(tmp_path, _recording(tmp_path / name)) == 0
    judge = read_judge(folder / CONFIDENCE_FILE, model_folder=folder)
    assert (judge.model, judge.answers) == ("m", 600)
    assert judge.area > 0.6
    assert "held-out answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "truncated"), (b'{"format": "millrace-judge/9"}', "judge"), (b"[]", "Expected `object`")],
)
def test_a_file_that_is_no_judge_is_refused_with_the_reason(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "confidence.json"
    path.write_bytes(content)
    with pytest.raises(JudgeUnreadable, match=reason):
        read_judge(path)


def test_a_judge_that_is_not_better_is_not_written_unless_forced(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m")
    _train(tmp_path, _recording(tmp_path / "good.jsonl"))
    before = (folder / CONFIDENCE_FILE).read_bytes()
    again = _recording(tmp_path / "again.jsonl", seed=2, count=300)
    assert _train(tmp_path, again) == 3
    assert (folder / CONFIDENCE_FILE).read_bytes() == before
    assert _train(tmp_path, again, "--force") == 0
    assert (folder / CONFIDENCE_FILE).read_bytes() != before


def test_too_few_answers_make_no_judge() -> None:
    answers = [JudgedAnswer(f"q{index}", [-0.1], index % 2 == 0) for index in range(60)]
    result = train_judge("m", answers, fingerprint="f", incumbent=None)
    assert result.judge is None
    assert "too few" in result.reason


def test_a_recording_of_other_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _model(tmp_path / "x")
    words = ["train", "judge", "--from", str(_recording(tmp_path / "a.jsonl")), "--model-path", str(folder)]
    assert main(words) == 1
    assert "no answers of x" in capsys.readouterr().err


def test_a_torn_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _model(tmp_path / "m")
    path = tmp_path / "torn.jsonl"
    path.write_text('{"prompt": "q", "answers": {}}\n{"prompt": ')
    assert _train(tmp_path, path) == 1
    assert "torn.jsonl, line 2" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["nano", "micro", "mini"])
def test_each_shipped_model_has_a_judge_of_its_own_weights(size: str) -> None:
    folder = ROOT / "models" / f"millrace-{size}"
    judge = read_judge(folder / CONFIDENCE_FILE, model_folder=folder)
    assert judge.model == folder.name
    assert judge.area > 0.9
    assert judge.error <= 0.05
    sure, unsure = judge.score([-0.001] * 10), judge.score([-3.0] * 10)
    assert sure > 60 > 40 > unsure
