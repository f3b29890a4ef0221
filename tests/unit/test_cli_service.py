"""The unit that keeps a cluster up."""

import shutil
import subprocess
from pathlib import Path

import pytest
from millrace.cli.__main__ import main


def _install(folder: Path, *words: str) -> int:
    return main(["service", "--unit-dir", str(folder), "install", "--engine", "modelled", *words])


def test_a_unit_starts_what_up_would_and_leaves_engines_to_the_next_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _install(tmp_path / "units", "--dir", "100% mine", "--set", "worker.modelled.speed=2") == 0
    unit = tmp_path / "units" / "millrace.service"
    lines = unit.read_text().splitlines()
    start = next(line for line in lines if line.startswith("ExecStart="))
    assert '"up" "--engine" "modelled" "--dir" "100%% mine" "--set" "worker.modelled.speed=2"' in start
    assert start.endswith(f'"--dir" "{tmp_path}/100%% mine"')
    assert {"KillMode=process", "Restart=on-failure", f"WorkingDirectory={tmp_path}"} <= set(lines)
    assert "daemon-reload" in capsys.readouterr().out
    if analyze := shutil.which("systemd-analyze"):
        done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, [line for line in done.stderr.splitlines() if "millrace" in line]) == (0, [])


@pytest.mark.parametrize("words", [["--detach"], ["--instances", "0"]])
def test_what_up_could_not_run_as_a_unit_is_refused(tmp_path: Path, words: list[str]) -> None:
    assert _install(tmp_path / "units", *words) != 0
    assert not (tmp_path / "units").exists()
