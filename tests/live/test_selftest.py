"""`millrace selftest` on modelled engines: its steps, its report, and what it says where no cluster comes up."""

import json
from pathlib import Path

import pytest
from millrace.cli.__main__ import main


def test_every_step_passes_and_the_report_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["selftest", "--engine", "modelled", "--tokens", "800", "--report", str(report)]) == 0
    steps = json.loads(report.read_text())["steps"]
    assert [step["result"] for step in steps] == ["passed"] * 6
    assert all("text unchanged" in step["detail"] and "moved in epoch" in step["detail"] for step in steps[3:5])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        *("start", "self-tests", "serve", "move,", "back,", "kill", "report:")
    ]


def test_steps_whose_stream_is_over_before_it_is_found_fail_at_once(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(["selftest", "--engine", "modelled", "--tokens", "2", "--report", str(report)]) == 1
    steps = json.loads(report.read_text())["steps"]
    assert all("try more --tokens" in step["detail"] for step in steps[3:])


def test_without_a_cluster_the_reason_is_told_and_the_rest_is_skipped(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["selftest", "--engine", "modelled", "--model", str(tmp_path / "nothing"), "--report", str(report)]
    assert main(words) == 1
    first, *rest = json.loads(report.read_text())["steps"]
    assert (first["step"], first["result"]) == ("start", "failed")
    assert "nothing" in first["detail"]
    assert {step["result"] for step in rest} == {"skipped"}
