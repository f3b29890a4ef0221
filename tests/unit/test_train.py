"""``millrace train``: files for the models that ship, from recordings to a head in force, and what is refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from millrace.cascade.entry_files import ENTRY_FILE, read_entry
from millrace.cli.__main__ import main
from millrace.lengths.head import HEAD_FILE, read_head
from millrace.lengths.states import SequenceStates, StatesHeader, state_writer

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "bench" / "judged" / "recordings" / "answers.jsonl.gz"
FOLDERS = [ROOT / "models" / f"millrace-{name}" for name in ("nano", "micro", "mini")]


def _train(output: Path, *words: str, recording: Path = RECORDING) -> int:
    folders = [str(folder) for folder in FOLDERS]
    return main(["train", "entry", "--from", str(recording), "--model-path", *folders, "--output", str(output), *words])


def test_the_file_that_ships_belongs_to_the_models_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = read_entry(FOLDERS[-1] / ENTRY_FILE, folders=FOLDERS).file
    assert _train(tmp_path / "entry.json") == 0
    told = capsys.readouterr().out
    assert "saves enough" in told
    again = read_entry(tmp_path / "entry.json", folders=FOLDERS).file
    assert (again.models, again.value) == (shipped.models, pytest.approx(shipped.value))
    assert again.costs == pytest.approx(shipped.costs)


def test_a_recording_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tmp_path / "few.jsonl"
    few.write_bytes(b"\n".join(gzip.decompress(RECORDING.read_bytes()).splitlines()[:50]))
    assert _train(tmp_path / "entry.json", recording=few) != 0
    assert "needs 50 answers" in capsys.readouterr().err
    assert not (tmp_path / "entry.json").exists()


def test_costs_that_do_not_fit_the_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path / "entry.json", "--costs", "1", "2") != 0
    assert "3 models and 2 costs" in capsys.readouterr().err


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
    assert main(["train", "remaining", "--from", str(states), "--model-path", str(tmp_path)]) == 3
    assert not (tmp_path / HEAD_FILE).exists()
