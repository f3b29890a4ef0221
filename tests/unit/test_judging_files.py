"""Files of confidence judges: written, read, refused for other weights; ``millrace train judge``; the shipped ones."""

import gzip
import json
import math
from pathlib import Path
from random import Random

import pytest
from millrace.cli.__main__ import main
from millrace.judging.files import CONFIDENCE_FILE, JudgedAnswer, JudgeUnreadable, read_judge
from millrace.judging.training import train_judge

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
