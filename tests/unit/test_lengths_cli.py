"""``millrace train tagger`` and ``remaining``: from recordings to a model in force, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from millrace.cli.__main__ import main
from millrace.lengths.files import MODEL_FILE, outcome_writer, read_models, read_requests
from millrace.lengths.head import HEAD_FILE, read_head
from millrace.lengths.quantile import decode_model
from millrace.lengths.samples import samples_of
from millrace.lengths.states import SequenceStates, StatesHeader, state_writer


def _recording(path: Path, *, count: int = 400, scale: float = 1.0, seed: int = 1) -> Path:
    """Requests whose numbers decide their lengths."""
    rng = Random(seed)
    lines = []
    for _ in range(count):
        span = rng.randrange(1, 300)
        length = max(1, round(scale * span * rng.lognormvariate(0, 0.1)))
        line = {"prompt": f"Count from 1 to {span + 1}.", "prompt_tokens": 9, "output_tokens": [length]}
        lines.append(json.dumps(line))
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write("\n".join(lines))
    return path


def _train(tmp_path: Path, *words: str) -> int:
    return main(["train", "tagger", "--model", "m", "--directory", str(tmp_path / "lengths"), *words])


@pytest.mark.parametrize("name", ["requests.jsonl", "requests.jsonl.gz"])
def test_recorded_requests_become_the_model_in_force(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path, "--requests", str(_recording(tmp_path / name))) == 0
    models, _ = read_models(tmp_path / "lengths", shipped=False)
    assert decode_model(models["m"]).file.samples == 300
    assert "is better on 100 held-out outcomes" in capsys.readouterr().out


def test_outcomes_that_a_tagger_kept_become_the_model_in_force(tmp_path: Path) -> None:
    with _recording(tmp_path / "r.jsonl").open("rb") as lines:
        samples = list(samples_of(read_requests(lines, "r")))
    outcome_writer(tmp_path / "lengths", "m", "tagger-0").append(samples)
    assert _train(tmp_path, "--from", str(tmp_path / "lengths" / "m" / "tagger-0.outcomes")) == 0
    assert (tmp_path / "lengths" / "m" / MODEL_FILE).exists()


def test_a_model_that_is_not_better_is_not_put_in_force_unless_forced(tmp_path: Path) -> None:
    good, stale = _recording(tmp_path / "good.jsonl"), tmp_path / "stale.jsonl"
    older, newer = (_recording(tmp_path / f"{n}.jsonl", count=c, scale=s) for n, c, s in (("a", 300, 4), ("b", 100, 1)))
    stale.write_text(older.read_text() + "\n" + newer.read_text())
    assert _train(tmp_path, "--requests", str(good)) == 0
    before = read_models(tmp_path / "lengths", shipped=False)[0]["m"]
    assert _train(tmp_path, "--requests", str(stale)) == 3
    assert read_models(tmp_path / "lengths", shipped=False)[0]["m"] == before
    assert _train(tmp_path, "--requests", str(stale), "--force") == 0
    assert read_models(tmp_path / "lengths", shipped=False)[0]["m"] != before


def test_too_few_outcomes_are_said_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path, "--requests", str(_recording(tmp_path / "r.jsonl", count=9)), "--force") == 3
    assert "9 outcomes are too few" in capsys.readouterr().out
    assert not (tmp_path / "lengths").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt_tokens": 3}', "missing required field `output_tokens`"),
        ('{"prompt_tokens": "three", "output_tokens": [1]}', "prompt_tokens"),
        ("not json", "malformed"),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_file_and_line(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"prompt_tokens": 3, "output_tokens": [1]}\n' + line)
    assert _train(tmp_path, "--requests", str(path)) != 0
    said = capsys.readouterr().err
    assert "r.jsonl:2" in said
    assert says in said


def test_absurd_lengths_are_left_out(tmp_path: Path) -> None:
    lines = [{"prompt_tokens": 3, "output_tokens": [value]} for value in (-1, 0, 10**15, 5)]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with (tmp_path / "r.jsonl").open("rb") as file:
        assert [sample.lengths for sample in samples_of(read_requests(file, "r"))] == [[5]]


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path, "--from", str(tmp_path / "nowhere.outcomes")) != 0
    assert "nowhere.outcomes" in capsys.readouterr().err


def _states(path: Path, *, count: int = 500, informative: bool = True) -> Path:
    """Sequences whose states tell their rest in one column."""
    rng = np.random.default_rng(1)
    writer = state_writer(path, StatesHeader(model="m", fingerprint="f", hidden_size=8))
    for number in range(count):
        length = int(rng.geometric(1 / 80))
        at = int(rng.integers(length))
        state = rng.normal(0, 1, 8)
        if informative:
            state[2] = np.log1p(length - at)
        writer.append([SequenceStates([number], length, True, 5_000, 0, [at], state.astype("<f2").tobytes())])
    return path


def test_states_become_a_head_beside_the_model_and_the_same_again_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = _states(tmp_path / "states", count=800)
    words = ["train", "remaining", "--from", str(states), "--model-path", str(tmp_path)]
    assert main(words) == 0
    assert "is better on" in capsys.readouterr().out
    head = read_head(tmp_path / HEAD_FILE, fingerprint="f")
    assert head.info.figures["head"]["error"] < head.info.figures["survival"]["error"]
    assert main(words) == 3
    assert main([*words, "--force"]) == 0


def test_states_that_tell_nothing_put_no_head_in_force(tmp_path: Path) -> None:
    states = _states(tmp_path / "states", informative=False)
    assert main(["train", "remaining", "--from", str(states), "--output", str(tmp_path / "head")]) == 3
    assert not (tmp_path / "head").exists()


def test_a_file_without_states_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "states"
    path.write_text("nothing of the kind\n")
    assert main(["train", "remaining", "--from", str(path), "--output", str(tmp_path / "head")]) != 0
    assert str(path) in capsys.readouterr().err
