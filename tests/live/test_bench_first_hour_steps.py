"""The first hour's script where there is no GPU: it looks at the machine and says why it skips the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from millrace.cli.machine_probes import look

from bench.gpu.first_hour import ROOT, _awaited


@pytest.mark.skipif(bool(look(ROOT, ()).gpus), reason="there is a GPU here, and this would take an hour")
def test_without_a_gpu_it_looks_at_the_machine_and_skips_the_rest(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu.first_hour", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    machine, *others = json.loads((tmp_path / "summary.json").read_text())
    assert (machine["step"], machine["outcome"]) == ("machine", "done")
    assert "Millrace will run" in (tmp_path / "machine.txt").read_text()
    assert len(others) == 7
    assert all(result["outcome"] == "skipped" and "no GPU" in result["why"] for result in others)


def test_a_step_that_takes_too_long_is_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, start_new_session=True)
    assert _awaited(process, 0.2) == ("time is up", "not done after 0 s")
    assert process.poll() is not None
