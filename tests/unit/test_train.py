"""``millrace train``: files for the models that ship, and what is refused."""

import gzip
from pathlib import Path

import pytest
from millrace.cascade.entry_files import ENTRY_FILE, read_entry
from millrace.cli.__main__ import main

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
