"""A fresh recording of real vLLM equals the committed one: an upgrade that schedules otherwise shows here.

That the model equals the recordings is checked without vLLM, in tests/unit/test_enginemodel_fidelity.py.
"""

from pathlib import Path

import msgspec
import pytest

from tests.testbed.programs import output_of
from tests.testbed.schedule_recording import RecordedRun

RECORDINGS = Path(__file__).resolve().parent / "recordings"

# Runs whose batches do not depend on which tokens are sampled: those may differ between processors.
FRESH = ["async-preemption", "windows", "states"]


def read(path: Path) -> RecordedRun:
    return msgspec.json.decode(path.read_bytes(), type=RecordedRun)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs, recorded just now."""
    folder = tmp_path_factory.mktemp("recordings")
    status, said = output_of("bench.engine.record_runs", [*FRESH, "--output", str(folder)], limit_s=240)
    assert status == 0, said
    return folder


@pytest.mark.parametrize("name", FRESH)
def test_real_vllm_schedules_as_it_did_when_it_was_recorded(fresh: Path, name: str) -> None:
    now, before = read(fresh / f"{name}.json"), read(RECORDINGS / f"{name}.json")
    assert now.log == before.log
    for index, (step, recorded) in enumerate(zip(now.steps, before.steps, strict=True)):
        assert step == recorded, f"step {index}: {now.engine} differs from {before.engine}"
